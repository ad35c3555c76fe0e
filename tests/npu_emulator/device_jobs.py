"""Jobs of test_device.py on an emulated NPU."""

from __future__ import annotations

import torch
from torch import nn


def write_through_views():
    x = torch.arange(6.0).view(2, 3).npu()
    transposed = (x.t() * 2 + 1).contiguous()
    x[0].fill_(7)
    x.t()[1:].add_(torch.ones((), device="npu"))
    return str(transposed.device), transposed.cpu(), x.cpu()


def out_arguments():
    a, b = torch.arange(3.0).npu(), torch.ones(3, device="npu")
    fresh = torch.empty(0, device="npu")
    torch.add(a, b, out=fresh)
    torch.mul(a, 3, out=a)  # the output is an input
    strided = torch.zeros(3, 2, device="npu")
    torch.add(a, b, out=strided[:, 1])
    return fresh.cpu(), a.cpu(), strided.cpu()


def grown_tensors(repeats: int) -> int:
    """How many of `repeats` tensors lost their values while they grew."""
    lost = 0
    for value in range(repeats):
        grown = torch.full((5000,), value, device="npu").resize_(9000)
        lost += not bool((grown[:5000] == value).all())
    return lost


def products_in_float32():
    generator = torch.Generator().manual_seed(3)
    a, b = (torch.randn(*shape, generator=generator) for shape in ((4, 5), (5, 6)))
    a, b, total = a.bfloat16().npu(), b.bfloat16().npu(), torch.ones(4, 6, device="npu")
    torch.addmm(total, a, b, out_dtype=torch.float32, out=total)
    return total.cpu(), 1 + a.cpu().float() @ b.cpu().float()


def train(device):
    """Three fused AdamW steps; returns losses, last gradients and parameters."""
    torch.manual_seed(5)
    tokens = torch.randint(50, (4, 6))
    model = nn.Sequential(
        nn.Embedding(50, 16), nn.LayerNorm(16), nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 50)
    ).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        logits = model(tokens.to(device))
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens.to(device).flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        losses.append(loss.item())
    parameters = list(model.parameters())
    return losses, [p.grad.cpu() for p in parameters], [p.detach().cpu() for p in parameters]


def memory_figures():
    """Bytes in use before, with and after a tensor of one MiB, and the peak."""
    torch.ones(1, device="npu")
    before = torch.npu.memory_allocated()
    torch.npu.reset_peak_memory_stats()
    tensor = torch.ones(1 << 18, device="npu")
    during = torch.npu.memory_allocated()
    del tensor
    free, total = torch.npu.mem_get_info()
    return (
        before,
        during,
        torch.npu.memory_allocated(),
        torch.npu.max_memory_allocated(),
        free,
        total,
    )


def random_numbers():
    """Draws that must be alike and draws that must not, by name."""
    draw = lambda **options: torch.randn(8, device="npu", **options).cpu()  # noqa: E731
    torch.manual_seed(7)
    first, second = draw(), draw()
    torch.manual_seed(7)
    again = draw()
    state = torch.npu.get_rng_state()
    third = draw()
    torch.npu.set_rng_state(state)
    restored = draw()
    generator = torch.Generator(device="npu").manual_seed(9)
    own = draw(generator=generator)
    generator.manual_seed(9)
    torch.randn(1)  # the CPU's generator is another one
    own_again = draw(generator=generator)
    alike = [(first, again), (third, restored), (own, own_again)]
    unlike = [(first, second), (again, third), (own, first)]
    return alike, unlike


def random_state_of_the_cpu():
    torch.manual_seed(7)
    expected = torch.randn(4)
    torch.manual_seed(7)
    torch.randn(4, device="npu")
    return expected, torch.randn(4)


def streams_and_events():
    stream, event = torch.npu.Stream(), torch.npu.Event(enable_timing=True)
    x = torch.ones(3, device="npu")
    with torch.npu.stream(stream):
        y = x + 1
        event.record()
        y.record_stream(stream)
    torch.npu.current_stream().wait_stream(stream)
    event.synchronize()
    return event.query(), torch.npu.current_stream() != stream, y.tolist()


def second_device():
    torch.npu.set_device(1)
    x = torch.ones(2, device="npu").requires_grad_()
    (x * 2).sum().backward()
    return torch.npu.device_count(), str(x.device), str(x.grad.device)


def without_kernel():
    import torch_npu

    torch_npu.npu_rotated_iou(torch.ones(1, 2, 5).npu(), torch.ones(1, 2, 5).npu(), False, 0, True)


def without_cpu_kernel():
    torch.batch_norm_stats(torch.ones(2, 3).npu(), 1e-5)
