"""Docstrings of public functions on tensors give shapes, where the function depends on them."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import mindspeed

PACKAGE = Path(mindspeed.__file__).parent
SHAPE = re.compile(r"\[[^\]]*\]|scalar|[Aa]ny shapes?|same shape|elementwise")
# "of a tensor (any shape and dtype)": a function that takes any tensor need not say so.
NOISE = re.compile(r"\(any shape and dtype\)|(?:of|for) any shape and dtype")
READS_SHAPE = {
    *("shape", "dim", "ndim", "view", "reshape", "flatten", "unflatten", "unsqueeze"),
    *("squeeze", "transpose", "permute", "t", "T", "mT", "matmul", "bmm", "mm", "einsum", "linear"),
    *("chunk", "unbind", "cat", "stack", "narrow", "expand", "index_select"),
    *("topk", "cumsum", "softmax", "new_empty", "new_zeros", "layer_norm"),
}
Function = ast.FunctionDef | ast.AsyncFunctionDef


def public_functions(body: list[ast.stmt]) -> Iterator[Function]:
    """Functions of a module, and methods of its classes, without a leading underscore."""
    for node in body:
        if isinstance(node, ast.ClassDef | Function) and node.name.startswith("_"):
            continue
        if isinstance(node, ast.ClassDef | ast.If | ast.Try):
            yield from public_functions(node.body)
        elif isinstance(node, Function):
            yield node


def takes_or_returns_tensors(function: Function) -> bool:
    arguments = function.args
    optional = [a for a in (arguments.vararg, arguments.kwarg) if a is not None]
    named = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, *optional]
    annotations = [a.annotation for a in named] + [function.returns]
    return any(a is not None and re.search(r"\bTensor\b", ast.unparse(a)) for a in annotations)


def depends_on_shape(function: Function) -> bool:
    """It reads or changes dimensions, multiplies matrices, or takes rows: ``x[a, b]``."""
    return any(
        (isinstance(node, ast.Attribute) and node.attr in READS_SHAPE)
        or (isinstance(node, ast.BinOp) and isinstance(node.op, ast.MatMult))
        or (
            isinstance(node, ast.Subscript)
            and isinstance(node.slice, ast.Tuple)
            and any(isinstance(part, ast.Slice | ast.Constant) for part in node.slice.elts)
        )
        for statement in function.body
        for node in ast.walk(statement)
    )


def without_shapes(source: str) -> list[str]:
    return [
        function.name
        for function in public_functions(ast.parse(source).body)
        if takes_or_returns_tensors(function)
        and depends_on_shape(function)
        and not SHAPE.search(ast.get_docstring(function) or "")
    ]


def test_public_functions_on_tensors_give_shapes():
    missing = {
        str(path.relative_to(PACKAGE)): names
        for path in sorted(PACKAGE.rglob("*.py"))
        if (names := without_shapes(path.read_text()))
    }
    assert not missing, "say the shapes, such as [s, b, h], in the docstrings"


def test_no_docstring_says_that_a_tensor_may_be_any():
    found = [path for path in sorted(PACKAGE.rglob("*.py")) if NOISE.search(path.read_text())]
    assert {str(path.relative_to(PACKAGE)) for path in found} == set()


def test_a_docstring_without_shapes_is_found():
    source = (
        "class A:\n"
        "    def f(self, x: torch.Tensor) -> int:\n"
        '        """Count."""\n'
        "        return x.shape[0]\n"
    )
    assert without_shapes(source) == ["f"]
    assert not without_shapes(source.replace("Count", "Count x [s, b, h]"))
    assert not without_shapes(source.replace("def f", "def _f"))
    assert not without_shapes(source.replace("x.shape[0]", "id(x)"))


# The first word of a fragment: a docstring starts with a verb or names the thing.
FRAGMENT = re.compile(
    r"(Of|Its|Their|For|As|From|Where|Which|Whose|When|By|In|At|On|To|With|Without|That|Than|Also|"
    r"Must|May|Is|Are|Has|Have)\b(?!-)"
)
Documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def fragments(source: str) -> list[str]:
    texts = [
        ast.get_docstring(node) or ""
        for node in ast.walk(ast.parse(source))
        if isinstance(node, Documented)
    ]
    return [text.partition("\n")[0] for text in texts if FRAGMENT.match(text)]


def test_docstrings_start_with_a_verb_or_name_the_thing():
    found = {
        str(path.relative_to(PACKAGE)): lines
        for path in sorted(PACKAGE.rglob("*.py"))
        if (lines := fragments(path.read_text()))
    }
    assert found == {}


def test_a_fragment_is_found():
    source = 'class A:\n    def f(self):\n        """Of a step."""\n'
    assert fragments(source) == ["Of a step."]
    assert fragments(source.replace("Of", "Seconds of")) == []
