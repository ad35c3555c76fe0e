"""Arguments that lie in memory in every way that torch allows, for every operator.

    transposed   columns concatenated: no dimension but the first has stride 1
    sliced       every second column of wider rows
    cut          some columns of wider rows, so that only the last stride is 1
    offset       dense, from the second element of its storage on
    expanded     one row, column or element for all: stride 0 (floating point and masks; repeated
                 positions or boundaries of groups would be another question)

Whatever lies between the elements is NaN, or the largest number, and must be neither read nor
written to. What a kernel returns has to be what it returns for a dense copy of its arguments, in
the same memory format.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from mindspeed.ops.registry import Operator


def poison(x: torch.Tensor, size: Sequence[int]) -> torch.Tensor:
    """A tensor of what nobody may read."""
    if x.is_floating_point():
        return x.new_full(tuple(size), float("nan"))
    return x.new_full(tuple(size), True if x.dtype == torch.bool else torch.iinfo(x.dtype).max)


def _transposed(x: torch.Tensor) -> torch.Tensor:
    axes = tuple(reversed(range(x.dim())))
    return x.permute(axes).clone(memory_format=torch.contiguous_format).permute(axes)


def _sliced(x: torch.Tensor) -> torch.Tensor:
    return _within(x, 2 * x.shape[-1] + 1)[..., 1::2]


def _cut(x: torch.Tensor) -> torch.Tensor:
    return _within(x, x.shape[-1] + 3)[..., 1:-2]


def _within(x: torch.Tensor, width: int) -> torch.Tensor:
    return poison(x, (*x.shape[:-1], width))


def _offset(x: torch.Tensor) -> torch.Tensor:
    return poison(x, (x.numel() + 1,))[1:].view(x.shape)


PLACES = {"transposed": _transposed, "sliced": _sliced, "cut": _cut, "offset": _offset}
"""Ways to hold the same values."""


def placed(x: torch.Tensor, place: str) -> torch.Tensor:
    """The values of ``x``, held in another way; without gradient."""
    with torch.no_grad():
        view = PLACES[place](x.detach())
        return view if place == "transposed" else view.copy_(x)


def expanded(x: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """``x`` with one row, one column or one element for all."""
    if not (x.is_floating_point() or x.dtype == torch.bool) or not x.numel():
        return
    x = x.detach()
    if x.dim() > 1 and x.shape[0] > 1:
        yield "expanded rows", x[:1].clone().expand(x.shape)
    if x.dim() > 1 and x.shape[-1] > 1:
        yield "expanded columns", x[..., :1].clone().expand(x.shape)
    if x.dim() > 2 and x.shape[1] > 1:
        yield "expanded middle", x[:, :1].clone().expand(x.shape)
    yield "expanded", x.reshape(-1)[:1].clone().view([1] * x.dim()).expand(x.shape)


def variants(x: torch.Tensor, *, written: bool = False) -> Iterator[tuple[str, torch.Tensor]]:
    """Every way to hold ``x``, and with a stride of 0 unless it is written to."""
    if not x.dim():
        return
    for place in PLACES:
        yield place, placed(x, place)
    if not written:
        yield from expanded(x)


Arguments = tuple[Any, ...]


def cases(
    arguments: Arguments, written: Sequence[int] = (), *, each: bool = True
) -> Iterator[tuple[str, Arguments, bool]]:
    """``(name, arguments, whether the values are the given ones)``.

    Args:
        arguments: tensors, lists of tensors, and others, which stay.
        written: positions that are written to.
        each: one tensor at a time in every way, before all at once in every way.
    """
    flat = list(_tensors(arguments))
    for position, x in flat if each else ():
        for how, other in variants(x, written=position[0] in written):
            name = f"argument {'.'.join(map(str, position))}: {how}"
            fresh = {(i,): arguments[i].clone() for i in written}
            yield name, _with(arguments, fresh | {position: other}), how in PLACES
    for place in PLACES:
        others = {at: placed(x, place) for at, x in flat if x.dim()}
        yield f"all arguments: {place}", _with(arguments, others), True


Position = tuple[int, ...]


def _tensors(arguments: Sequence[Any], before: Position = ()) -> Iterator[tuple[Position, Any]]:
    for number, value in enumerate(arguments):
        if isinstance(value, torch.Tensor):
            yield (*before, number), value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value, (*before, number))


def _with(
    arguments: Sequence[Any], others: dict[Position, torch.Tensor], before: Position = ()
) -> Any:
    def one(number: int, value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            return type(value)(_with(value, others, (*before, number)))
        return others.get((*before, number), value)

    return tuple(one(number, value) for number, value in enumerate(arguments))


def dense(arguments: Any) -> Any:
    """The same values, each tensor with dense memory of its own."""
    if isinstance(arguments, (list, tuple)):
        return type(arguments)(dense(x) for x in arguments)
    if not isinstance(arguments, torch.Tensor):
        return arguments
    return arguments.detach().clone(memory_format=torch.contiguous_format)


def results(function: Any, arguments: Arguments, written: Sequence[int]) -> list[torch.Tensor]:
    """What ``function`` returns, then what it wrote to."""
    returned = function(*arguments)
    returned = list(returned) if isinstance(returned, (tuple, list)) else [returned]
    return [x for x in returned if isinstance(x, torch.Tensor)] + [arguments[i] for i in written]


def difference(ours: torch.Tensor, expected: torch.Tensor) -> str | None:
    """What is wrong with a result, or None."""
    if (ours.shape, ours.dtype) != (expected.shape, expected.dtype):
        return f"{ours.dtype} {tuple(ours.shape)}, not {expected.dtype} {tuple(expected.shape)}"
    if not expected.is_floating_point():
        return None if torch.equal(ours, expected) else "other values"
    # Another order of the same sums; what this looks for is off by a tenth at least, or NaN.
    rtol = {torch.float16: 2e-3, torch.bfloat16: 2e-2}.get(expected.dtype, 1e-4)
    ours, expected = ours.detach().double(), expected.detach().double()
    ordinary = expected[expected.isfinite()]
    # What cancels to almost nothing keeps the rounding of its terms, which are about 1.
    atol = rtol * max(float(ordinary.abs().max()) if ordinary.numel() else 0.0, 0.1)
    if torch.allclose(ours, expected, rtol=rtol, atol=atol, equal_nan=True):
        return None
    return f"off by {float((ours - expected).abs().nan_to_num(float('inf')).max()):.3g}"


def damaged(x: torch.Tensor) -> bool:
    """Whether somebody wrote between the elements of a view made by :func:`placed`."""
    count = x.untyped_storage().nbytes() // x.itemsize
    whole = torch.as_strided(x, (count,), (1,), 0).clone()
    torch.as_strided(whole, x.shape, x.stride(), x.storage_offset()).copy_(poison(x, x.shape))
    return not torch.equal(whole.isnan(), poison(whole, whole.shape).isnan())


Move = Callable[[int, torch.Tensor], torch.Tensor]


def _stays(position: int, x: torch.Tensor) -> torch.Tensor:
    return x


def to_device(device: str, on_host: Sequence[int] = ()) -> Move:
    """Moves arguments with the memory around them."""

    def move(position: int, x: torch.Tensor) -> torch.Tensor:
        if position in on_host:
            return x
        count = x.untyped_storage().nbytes() // x.itemsize
        whole = torch.as_strided(x, (count,), (1,), 0).to(device)
        return torch.as_strided(whole, x.shape, x.stride(), x.storage_offset())

    return move


def _moved(arguments: Arguments, move: Move) -> Arguments:
    return _with(arguments, {at: move(at[0], x) for at, x in _tensors(arguments)})


def forward_problems(
    operator: Operator,
    function: Any,
    sample: Arguments,
    *,
    each: bool = True,
    fake: bool = False,
    move: Move = _stays,
) -> list[str]:
    """Run a kernel on the cases of a sample; what went wrong.

    Args:
        operator: says what is written to.
        function: the operator or one of its kernels.
        sample: its arguments, on the CPU.
        each: as for :func:`cases`.
        fake: also ask the operator's fake kernel, which torch.compile believes.
        move: brings an argument to the device.
    """
    written, found = operator.mutated(), []
    known = None
    for name, strided, same_values in cases(sample, written, each=each):
        given, plain = _moved(strided, move), dense(strided)  # before somebody writes to them
        try:
            ours = results(function, given, written)
        except Exception as error:
            found.append(f"{name}: {_first_line(error)}")
            continue
        if same_values and known is not None:
            expected = known
        else:
            expected = results(function, _moved(plain, move), written)
        known = expected if same_values else known
        returned = len(expected) - len(written)
        for number, (got, wanted) in enumerate(zip(ours, expected, strict=True)):
            why = difference(got.cpu(), wanted.cpu())
            if why is None and number < returned and not got.is_contiguous():
                why = f"not contiguous: {tuple(got.shape)} with strides {got.stride()}"
            if why is not None:
                found.append(f"{name}: result {number}: {why}")
        if name.split()[-1] in ("sliced", "cut"):
            hurt = [i for i in written if damaged(given[i].cpu() if move is _stays else given[i])]
            found += [f"{name}: wrote beside argument {position}" for position in hurt]
        if fake:
            why = _fake_problem(operator, strided, ours[:returned])
            found += [f"{name}: {why}"] if why else []
    return found


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"


def _fake_problem(operator: Operator, arguments: Arguments, ours: list[torch.Tensor]) -> str | None:
    with FakeTensorMode() as mode:
        given = _moved(arguments, lambda _, x: mode.from_tensor(x))
        announced = results(operator, given, ())
    describe = lambda x: (x.dtype, tuple(x.shape), x.is_contiguous())  # noqa: E731
    said, done = (list(map(describe, tensors)) for tensors in (announced, ours))
    return None if said == done else f"the fake kernel says {said}, not {done}"


def gradient_problems(
    function: Any, sample: Arguments, *, each: bool = True, move: Move = _stays
) -> list[str]:
    """Differentiate with the cases of a sample and every kind of incoming gradient.

    Args:
        function: takes the arguments; a tensor or several are returned.
        sample: on the CPU.
        each: as for :func:`cases`.
        move: brings an argument to the device.
    """
    found: list[str] = []
    plain = dense(sample)
    outgoing = [x.shape for x in _outputs(function, _leaves(plain, move)[0])]
    incoming = [torch.linspace(-1, 1, s.numel()).view(s) for s in outgoing]
    known = _gradients(function, plain, incoming, move)

    def check(name: str, strided: Arguments, grads: list[torch.Tensor], expected: Any) -> None:
        try:
            ours = _gradients(function, strided, grads, move)
        except Exception as error:
            found.append(f"{name}: {_first_line(error)}")
            return
        expected = expected or _gradients(function, dense(strided), dense(grads), move)
        for number, (got, wanted) in enumerate(zip(ours, expected, strict=True)):
            if (why := difference(got, wanted)) is not None:
                found.append(f"{name}: gradient {number}: {why}")

    for name, strided, same_values in cases(sample, each=each):
        check(name, strided, incoming, known if same_values else None)
    for place in PLACES:
        grads = [placed(x, place) if x.dim() else x for x in incoming]
        check(f"incoming gradient: {place}", plain, grads, known)
    check("incoming gradient: expanded", plain, [torch.tensor(0.5).expand(s) for s in outgoing], 0)
    return found


def _leaves(arguments: Arguments, move: Move) -> tuple[Arguments, list[torch.Tensor]]:
    leaves: dict[Position, torch.Tensor] = {}
    for position, x in _tensors(arguments):
        moved = move(position[0], x.detach())
        leaves[position] = moved.requires_grad_(moved.is_floating_point())
    return _with(arguments, leaves), [x for x in leaves.values() if x.requires_grad]


def _outputs(function: Any, arguments: Arguments) -> list[torch.Tensor]:
    returned = function(*arguments)
    returned = list(returned) if isinstance(returned, (tuple, list)) else [returned]
    return [x for x in returned if isinstance(x, torch.Tensor) and x.requires_grad]


def _gradients(
    function: Any, arguments: Arguments, grads: list[torch.Tensor], move: Move
) -> list[torch.Tensor]:
    given, leaves = _leaves(arguments, move)
    outputs = _outputs(function, given)
    # The cast keeps strides, but not what lies between the elements, which is nobody's here.
    incoming = [move(-1, g.to(x.dtype)) for g, x in zip(grads, outputs, strict=True)]
    got = torch.autograd.grad(outputs, leaves, incoming, allow_unused=True)
    return [x.detach().cpu() for x in (*outputs, *got) if x is not None]
