"""How models write calls of tools and reasoning, as data; which format a chat template suggests.

JsonFormat      <tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>
TaggedFormat    <tool_call><function=f><parameter=a>1</parameter></function></tool_call>
ChannelFormat   <|channel|>commentary to=functions.f<|message|>{"a": 1}<|call|>
"""

from __future__ import annotations

from dataclasses import dataclass

from mindspeed.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class CallFormat:
    """What all formats have.

    Attributes:
        name: As ``--tool-call-parser`` names it, where vLLM has it, too, by its name.
        opens: Text that begins the calls of an answer.
        shown: Special tokens that are a part of the format.
        stops: Tokens that end an answer.
        template: Texts that occur in the chat template of such a model.
        others: Texts that do not.
        answer_header: Text between the prompt and an answer without reasoning.
        short_ids: Ids of calls have nine letters and digits, as the template requires.
    """

    name: str
    opens: str
    shown: tuple[str, ...] = ()
    stops: tuple[str, ...] = ()
    template: tuple[str, ...] = ()
    others: tuple[str, ...] = ()
    answer_header: str = ""
    short_ids: bool = False


@dataclass(frozen=True, kw_only=True)
class JsonFormat(CallFormat):
    """Arguments are a JSON object. Between two calls, and around them, stands no other text.

    They come after the name (group ``name`` of the expressions) or within one object that has
    both: ``{"name": ..., "arguments" or "parameters": {...}}``.

    Attributes:
        begin: Expression of the text from ``opens`` up to the first ``{``.
        between: Expression of the text between two objects.
        end: Expression of the text after the last one.
        start: Text that begins calls as well, but only as the first of an answer.
    """

    begin: str
    between: str
    end: str
    start: str = ""


@dataclass(frozen=True, kw_only=True)
class TaggedFormat(CallFormat):
    """Each argument stands between tags: a string as it is, anything else as JSON.

    Attributes:
        head: Expression from ``opens`` to the end of the name (group ``name``).
        argument: Expression of the text before a value, with its group ``key``.
        value_end: Text after a value. A line break before it is not a part of the value, if
            ``argument`` ends with one.
        end: Expression of the text from the last argument to the end of the call.
        cut_end: The same where the answer ends there, without its last tag.
    """

    head: str
    argument: str
    value_end: str
    end: str
    cut_end: str = "(?!)"


@dataclass(frozen=True, kw_only=True)
class ChannelFormat(CallFormat):
    """Harmony: an answer is messages, each with a channel and perhaps a recipient."""


_MISTRAL = r"\[TOOL_CALLS\]\s*(?P<name>[\w.-]+)(\[CALL_ID\]\w+)?(\[ARGS\])?\s*"
_DEEPSEEK = tuple(  # with a fullwidth bar and a lower block
    f"<\uff5c{name}\uff5c>".replace("_", "\u2581")
    for name in (
        "tool_calls_begin",
        "tool_call_begin",
        "tool_sep",
        "tool_call_end",
        "tool_calls_end",
    )
)
_CALLS, _CALL, _SEPARATOR, _CALL_END, _CALLS_END = _DEEPSEEK
_GLM = ("<tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "</tool_call>")
_V3 = rf"\s*{_CALL}function{_SEPARATOR}(?P<name>[^\s<]+)\s*```json\s*"
_V31 = rf"\s*{_CALL}(?P<name>[^\s<]+)\s*{_SEPARATOR}\s*"

FORMATS: tuple[CallFormat, ...] = (
    JsonFormat(
        name="hermes",
        opens="<tool_call>",
        begin=r"<tool_call>\s*",
        between=r"\s*</tool_call>\s*<tool_call>\s*",
        end=r"\s*(</tool_call>\s*)?",
        shown=("<tool_call>", "</tool_call>"),
        template=("<tool_call>",),
        others=("<function=", "<arg_key>"),
    ),
    JsonFormat(
        name="llama3_json",
        opens="<|python_tag|>",
        begin=r"(<\|python_tag\|>)?\s*",
        between=r"\s*;\s*",
        end=r"\s*;?\s*",
        start="{",
        shown=("<|python_tag|>",),
        template=('"parameters": ', "<|start_header_id|>"),
    ),
    JsonFormat(
        name="mistral",
        opens="[TOOL_CALLS]",
        begin=rf"\[TOOL_CALLS\]\s*\[\s*|{_MISTRAL}",
        between=rf"\s*,\s*|\s*{_MISTRAL}",
        end=r"\s*\]?\s*",
        shown=("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"),
        template=("[TOOL_CALLS]",),
        short_ids=True,
    ),
    JsonFormat(
        name="deepseek_v3",
        opens=_CALLS,
        begin=_CALLS + _V3,
        between=rf"\s*```\s*{_CALL_END}{_V3}",
        end=rf"\s*(```\s*)?({_CALL_END}\s*)?({_CALLS_END})?\s*",
        shown=_DEEPSEEK,
        template=(_SEPARATOR, "```json"),
    ),
    JsonFormat(
        name="deepseek_v31",
        opens=_CALLS,
        begin=_CALLS + _V31,
        between=rf"\s*{_CALL_END}{_V31}",
        end=rf"\s*({_CALL_END}\s*)?({_CALLS_END})?\s*",
        shown=_DEEPSEEK,
        template=(_SEPARATOR,),
        others=("```json",),
    ),
    TaggedFormat(
        name="qwen3_coder",
        opens="<tool_call>",
        head=r"<tool_call>\s*<function=(?P<name>[^>\n]+)>",
        argument=r"\s*<parameter=(?P<key>[^>\n]+)>\n?",
        value_end="</parameter>",
        end=r"\s*</function>\s*</tool_call>",
        cut_end=r"\s*</function>\s*",
        shown=("<tool_call>", "</tool_call>"),
        template=("<tool_call>", "<function=", "<parameter="),
    ),
    TaggedFormat(
        name="glm45",
        opens="<tool_call>",
        head=r"<tool_call>\s*(?P<name>[^\s<]+)\s*(?=<)",
        argument=r"\s*<arg_key>(?P<key>[^<]*)</arg_key>\s*<arg_value>",
        value_end="</arg_value>",
        end=r"\s*</tool_call>",
        shown=_GLM,
        template=("<tool_call>", "<arg_key>"),
    ),
    ChannelFormat(
        name="gpt_oss",
        opens="<|channel|>",
        shown=("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|end|>"),
        template=("<|channel|>analysis<|message|>", "<|call|>"),
        stops=("<|call|>", "<|return|>"),
        answer_header="<|channel|>final<|message|>",
    ),
)
# What an answer must be where a request demands a call: a list of objects, by a grammar.
JSON_LIST = JsonFormat(
    name="json", opens="[", begin=r"\s*\[\s*", between=r"\s*,\s*", end=r"\s*\]\s*", start="["
)

REASONING = (("<think>", "</think>"), ("[THINK]", "[/THINK]"))


def format_of(source: str, name: str = "auto") -> CallFormat | None:
    """The format ``name``, by default the one of a chat template's program; None: no known one.

    Raises:
        ConfigError: There is no format of this name.
    """
    if name != "auto":
        found = next((one for one in FORMATS if one.name == name), None)
        if found is None:
            names = ", ".join(one.name for one in FORMATS)
            raise ConfigError(f"--tool-call-parser {name}: auto, {names} are known")
        return found
    for one in FORMATS:
        if all(text in source for text in one.template) and not any(
            text in source for text in one.others
        ):
            return one
    return None


def reasoning_of(source: str) -> tuple[str, str] | None:
    """What begins and ends the reasoning of answers in a chat template's program."""
    return next((marks for marks in REASONING if marks[1] in source), None)
