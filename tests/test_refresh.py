"""When bases change, and how good the new ones are."""

from __future__ import annotations

from collections.abc import Sequence
from threading import Barrier, Thread

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from tsr.refresh import (
    Average,
    Decomposition,
    RefreshMethod,
    RefreshRule,
    RefreshTask,
    Samples,
    gaussian,
    local_sketch,
    one_pass,
    sketch,
    svd,
)
from tsr.subspace import Basis, lift, orthonormalise, project

ALONE: Average = lambda tensors, role: tensors  # noqa: E731


def random(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


def spectrum(values: Tensor, *, rows: int, columns: int) -> Tensor:
    """A random matrix of these singular values."""
    count = len(values)
    return orthonormalise(random(rows, count)) @ values.double().diag() @ orthonormalise(random(columns, count)).T


def task(gradient: Tensor, rank: int, *, oversampling: int = 5) -> RefreshTask:
    width = RefreshRule(oversampling=oversampling).width(rank, (gradient.shape[0], gradient.shape[1]))
    shape = (gradient.shape[1], width)
    return RefreshTask(gradient, rank, lambda: gaussian(shape, seed=0, step=1, name="w", like=gradient))


def samples_of(shape: tuple[int, int], rank: int, *, oversampling: int = 5, draw: int = 0) -> Samples:
    """Without a gradient yet; Omega is that of `task`, and ``draw`` is the seed of Psi."""
    width = RefreshRule(oversampling=oversampling).width(rank, shape)
    like = torch.zeros(0, dtype=torch.float64)
    return Samples(
        shape,
        rank,
        width,
        right=lambda: gaussian((shape[1], width), seed=0, step=1, name="w", like=like),
        left=lambda size: gaussian(size, seed=draw, step=1, name="psi", like=like),
        like=like,
    )


def once(gradients: Sequence[Tensor], rank: int, *, oversampling: int = 5, draw: int = 0) -> Decomposition:
    """The one-pass refresh of a sum of gradients by one worker."""
    rows, columns = gradients[0].shape
    samples = samples_of((rows, columns), rank, oversampling=oversampling, draw=draw)
    for gradient in gradients:
        samples.add(gradient)
    return one_pass([samples], RefreshRule(method="one_pass"), ALONE)[0]


def approximation(decomposition: Decomposition) -> Tensor:
    """U S V^T."""
    return lift(decomposition.values.diag(), decomposition.basis)


def relative_error(gradient: Tensor, basis: Basis) -> float:
    """Of U U^T G V V^T."""
    return float((lift(project(gradient, basis), basis) - gradient).norm() / gradient.norm())


def columns_span_the_same(a: Tensor | None, b: Tensor | None) -> bool:
    assert a is not None and b is not None
    return torch.allclose(a @ a.T, b @ b.T, atol=1e-9)


def together(method: RefreshMethod, gradients: Sequence[Tensor], rank: int, rule: RefreshRule) -> list[Basis]:
    """Run a refresh on several workers, as threads that meet in each average; return the basis of each."""
    barrier = Barrier(len(gradients), timeout=60)
    sent: list[Sequence[Tensor]] = [[]] * len(gradients)
    bases: list[Basis] = [Basis(None, None)] * len(gradients)

    def work(worker: int) -> None:
        def average(tensors: Sequence[Tensor], role: str) -> Sequence[Tensor]:
            sent[worker] = tensors
            barrier.wait()
            means = [torch.stack(parts).mean(0) for parts in zip(*sent, strict=True)]
            barrier.wait()
            return means

        bases[worker] = method([task(gradients[worker], rank)], rule, average)[0]

    threads = [Thread(target=work, args=(worker,)) for worker in range(len(gradients))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return bases


def noisy_gradients(workers: int, *, side: int = 64, signal_to_noise: float = 0.3) -> list[Tensor]:
    """A shared signal of decaying spectrum, and each worker's own noise, larger by 1 / signal_to_noise."""
    signal = spectrum(torch.arange(1, side + 1).double() ** -1.0, rows=side, columns=side)
    noise = [random(side, side) for _ in range(workers)]
    return [signal + signal.norm() / signal_to_noise * n / n.norm() for n in noise]


def test_phase_says_which_steps_refresh() -> None:
    def due(phase: int, interval: int) -> list[int]:
        return [step for step in range(1, 10) if RefreshRule(phase=phase).due(step, interval)]

    assert due(1, 3) == [1, 4, 7]
    assert due(0, 3) == [1, 3, 6, 9]
    assert due(1, 1) == due(0, 1) == list(range(1, 10))
    assert due(1, 100) == [1]


@pytest.mark.parametrize("phase", [0, 1])
@pytest.mark.parametrize("interval", [1, 2, 3, 5])
def test_age_counts_updates_since_the_last_refresh(phase: int, interval: int) -> None:
    rule = RefreshRule(phase=phase)
    age = 0
    for step in range(1, 14):
        age = 1 if rule.due(step, interval) else age + 1
        assert rule.age(step, interval) == age


def test_sketch_is_never_wider_than_the_matrix() -> None:
    rule = RefreshRule(oversampling=5)
    assert rule.width(4, (40, 30)) == 9
    assert rule.width(4, (8, 30)) == 8
    assert rule.width(4, (40, 6)) == 6


def test_gaussian_depends_on_seed_step_and_name_alone() -> None:
    like = torch.zeros(1)

    def draw(seed: int = 0, step: int = 1, name: str = "w", like: Tensor = like) -> Tensor:
        return gaussian((50, 40), seed=seed, step=step, name=name, like=like)

    state = torch.random.get_rng_state()
    first = draw()
    assert torch.equal(torch.random.get_rng_state(), state)
    torch.randn(3)
    assert torch.equal(draw(), first)
    for other in (draw(seed=1), draw(step=2), draw(name="x")):
        assert abs(float(torch.corrcoef(torch.stack([first.flatten(), other.flatten()]))[0, 1])) < 0.1
    assert torch.equal(draw(like=like.double()), first.double())  # one stream for all dtypes
    assert abs(float(first.mean())) < 0.1 and abs(float(first.std()) - 1) < 0.1


@pytest.mark.parametrize("shape", [(30, 20), (20, 30), (20, 20)])
@pytest.mark.parametrize("method", [svd, sketch, local_sketch])
@pytest.mark.parametrize("power_iterations", [0, 2])
def test_a_gradient_of_the_rank_is_reproduced_exactly(
    method: RefreshMethod, shape: tuple[int, int], power_iterations: int
) -> None:
    """U U^T G V V^T = G, and sketches find the singular vectors themselves."""
    rank = 4
    gradient = spectrum(torch.tensor([4.0, 3.0, 2.0, 1.0]), rows=shape[0], columns=shape[1])
    rule = RefreshRule(power_iterations=power_iterations)
    basis = method([task(gradient.clone(), rank)], rule, ALONE)[0]
    assert relative_error(gradient, basis) < 1e-12
    left, _, right = torch.linalg.svd(gradient)
    assert columns_span_the_same(basis.left, left[:, :rank])
    assert columns_span_the_same(basis.right, right[:rank].T)
    core = project(gradient, basis)
    assert_close(core.diag().abs(), torch.tensor([4.0, 3.0, 2.0, 1.0], dtype=torch.float64))
    assert_close(core, core.diag().diag())


@pytest.mark.parametrize("power_iterations", [0, 1, 2])
def test_sketch_is_orthonormal_and_is_that_of_the_mean_gradient(power_iterations: int) -> None:
    """Recomputed by hand from the mean gradient; the basis is the same on all workers."""
    gradients = noisy_gradients(3, side=24)
    mean = torch.stack(gradients).mean(0)
    bases = together(sketch, gradients, 6, RefreshRule(power_iterations=power_iterations))
    sample = mean @ task(mean, 6).start
    for _ in range(power_iterations):
        sample = mean @ torch.linalg.qr(mean.T @ torch.linalg.qr(sample)[0])[0]
    q = torch.linalg.qr(sample)[0]
    left, _, right = torch.linalg.svd(q.T @ mean)
    for u, v in bases:
        assert u is not None and v is not None
        assert_close(u.T @ u, torch.eye(6, dtype=torch.float64))
        assert_close(v.T @ v, torch.eye(6, dtype=torch.float64))
        assert columns_span_the_same(u, q @ left[:, :6])
        assert columns_span_the_same(v, right[:6].T)
        assert all(torch.equal(side, first) for side, first in zip((u, v), bases[0], strict=True) if first is not None)


@pytest.mark.parametrize("power_iterations", [0, 1])
def test_what_sketches_send_is_linear_in_the_gradient(power_iterations: int) -> None:
    """B = Q^T mean(G) exactly, which is what makes the averaged sketch sound."""
    gradients = noisy_gradients(2, side=12)
    sent: list[Tensor] = []

    def average(tensors: Sequence[Tensor], role: str) -> Sequence[Tensor]:
        assert role == "sketch"
        sent.extend(tensor.clone() for tensor in tensors)
        return tensors

    mean = torch.stack(gradients).mean(0)
    sketch([task(mean, 3)], RefreshRule(power_iterations=power_iterations), average)
    assert len(sent) == 2 + 2 * power_iterations
    q = torch.linalg.qr(sent[-2])[0]
    assert_close(sent[-1], torch.stack([q.T @ g for g in gradients]).mean(0))


def test_local_sketch_is_algorithm_1_to_the_letter() -> None:
    gradients = noisy_gradients(3, side=24)
    omega = task(gradients[0], 6).start
    ranges = [torch.linalg.qr(g @ omega)[0] for g in gradients]
    ranges = [torch.linalg.qr(g @ torch.linalg.qr(g.T @ q)[0])[0] for q, g in zip(ranges, gradients, strict=True)]
    reduced = torch.stack([q.T @ g for q, g in zip(ranges, gradients, strict=True)]).mean(0)
    left, _, right = torch.linalg.svd(reduced)
    u = torch.stack(ranges).mean(0) @ left[:, :6]
    for basis in together(local_sketch, gradients, 6, RefreshRule(power_iterations=1)):
        assert columns_span_the_same(basis.left, u)
        assert columns_span_the_same(basis.right, right[:6].T)


def test_averaging_local_bases_is_unsound_unless_the_workers_agree() -> None:
    """The TSR paper's Algorithm 1 to the letter averages the Q_i, which shrinks U when gradients differ.

    With a noisy gradient the singular values of U lie well below 1 and much of the mean gradient is lost; the averaged
    sketch, at the same payload, comes close to the best that the rank allows.
    """
    gradients = noisy_gradients(4)
    mean = torch.stack(gradients).mean(0)
    rule = RefreshRule(power_iterations=1)
    literal = together(local_sketch, gradients, 32, rule)[0]
    sound = together(sketch, gradients, 32, RefreshRule())[0]
    best = svd([task(mean.clone(), 32)], rule, ALONE)[0]
    assert literal.left is not None and literal.right is not None
    values = torch.linalg.svdvals(literal.left)
    assert values.max() < 0.95 and values.median() < 0.7
    assert_close(literal.right.T @ literal.right, torch.eye(32, dtype=torch.float64))
    assert relative_error(mean, best) <= relative_error(mean, sound) < 0.75 * relative_error(mean, literal)

    agreeing = [gradients[0]] * 4
    for method, again in ((local_sketch, rule), (sketch, rule)):
        basis = together(method, agreeing, 32, again)[0]
        alone = method([task(gradients[0], 32)], again, ALONE)[0]
        assert columns_span_the_same(basis.left, alone.left)
        assert columns_span_the_same(basis.right, alone.right)
    assert columns_span_the_same(
        together(local_sketch, agreeing, 32, rule)[0].left, together(sketch, agreeing, 32, rule)[0].left
    )


@pytest.mark.parametrize("method", [sketch, local_sketch])
def test_power_iterations_help_on_a_slowly_decaying_spectrum(method: RefreshMethod) -> None:
    gradient = spectrum(torch.arange(1, 61).double() ** -0.3, rows=80, columns=60)
    errors = [
        relative_error(gradient, method([task(gradient, 8)], RefreshRule(power_iterations=count), ALONE)[0])
        for count in (0, 1, 3)
    ]
    best = relative_error(gradient, svd([task(gradient.clone(), 8)], RefreshRule(), ALONE)[0])
    assert errors[0] > errors[1] > errors[2] > best
    assert errors[2] - best < 0.25 * (errors[0] - best)


def test_starting_from_the_basis_in_use_beats_a_fresh_start() -> None:
    """A power iteration for nothing, as long as the gradient's subspace moves slowly."""
    gradient = spectrum(torch.arange(1, 61).double() ** -0.3, rows=80, columns=60)
    fresh = task(gradient, 8)
    basis = sketch([fresh], RefreshRule(), ALONE)[0]
    assert basis.right is not None
    start = torch.cat([basis.right, fresh.start[:, 8:]], dim=1)
    again = sketch([RefreshTask(gradient, 8, lambda: start)], RefreshRule(), ALONE)[0]
    assert relative_error(gradient, again) < relative_error(gradient, basis)


def test_a_zero_gradient_gives_an_orthonormal_basis() -> None:
    zero = torch.zeros(9, 7, dtype=torch.float64)
    made = [
        method([task(zero.clone(), 3)], RefreshRule(power_iterations=1), ALONE)[0]
        for method in (svd, sketch, local_sketch)
    ]
    for u, v in (*made, once([zero], 3, oversampling=0).basis):
        assert u is not None and v is not None
        assert_close(u.T @ u, torch.eye(3, dtype=torch.float64))
        assert_close(v.T @ v, torch.eye(3, dtype=torch.float64))


# One pass


@pytest.mark.parametrize("shape", [(40, 20), (20, 40), (12, 40)])  # l = 19 < m twice, then l = m
def test_one_pass_reproduces_a_gradient_of_the_rank_and_its_singular_values(shape: tuple[int, int]) -> None:
    values = torch.tensor([4.0, 3.0, 2.0, 1.0], dtype=torch.float64)
    gradient = spectrum(values, rows=shape[0], columns=shape[1])
    found = once([gradient], 4)
    assert relative_error(gradient, found.basis) < 1e-12
    assert_close(found.values, values)
    assert_close(approximation(found), gradient)


def test_one_pass_sees_a_sum_of_gradients_as_one_and_so_does_the_mean_over_workers() -> None:
    """Blocks of several shapes at once, of which two share that of Psi^T Q and not that of W."""
    shapes = [(40, 20), (40, 20), (30, 24), (12, 40)]
    parts = [[random(*shape) for _ in range(3)] for shape in shapes]
    rule = RefreshRule(method="one_pass")
    samples = [samples_of(shape, 4, draw=index) for index, shape in enumerate(shapes)]
    workers = [[samples_of(shape, 4, draw=index) for index, shape in enumerate(shapes)] for _ in range(3)]
    for block, gradients in enumerate(parts):
        for worker, gradient in enumerate(gradients):
            samples[block].add(gradient)
            workers[worker][block].add(gradient)

    def average(tensors: Sequence[Tensor], role: str) -> Sequence[Tensor]:
        assert role == "sketch" and len(tensors) == len(shapes)
        return [torch.stack([worker[block].flat for worker in workers]).mean(0) for block in range(len(shapes))]

    together = one_pass(workers[0], rule, average)
    for block, (summed, mean) in enumerate(zip(one_pass(samples, rule, ALONE), together, strict=True)):
        alone = once([sum(parts[block], start=torch.zeros(()))], 4, draw=block)
        assert_close(approximation(summed), approximation(alone))
        assert_close(approximation(mean), approximation(alone) / 3)
        assert samples[block].flat.numel() == sum(part.numel() for part in samples[block].split(samples[block].flat))


def test_one_pass_is_the_two_pass_sketch_where_psi_is_the_identity() -> None:
    gradient = random(12, 40)
    basis = sketch([task(gradient, 6)], RefreshRule(), ALONE)[0]
    found = once([gradient], 6)
    assert_close(found.basis, basis)
    assert_close(found.values.diag(), project(gradient, basis))


def test_the_error_of_one_pass_is_that_of_theory() -> None:
    """Over Psi, E |G - Q B|^2 = (1 + k / (l - k - 1)) |G - Q Q^T G|^2, here twice, by the inverse of a Wishart matrix.

    Over both (Tropp et al. 2017, section 4) at most (1 + k / (l - k - 1)) (1 + s / (k - s - 1)) |G - G_s|^2, for any
    s < k - 1.
    """
    values = torch.arange(1, 31).double() ** -1.0
    gradient = spectrum(values, rows=50, columns=30)
    width = 6  # rank, too, so that nothing is cut off Q B
    q = torch.linalg.qr(gradient @ task(gradient, width, oversampling=0).start)[0]
    two_pass = float((gradient - q @ q.T @ gradient).square().sum())
    errors = [
        float((gradient - approximation(once([gradient], width, oversampling=0, draw=draw))).square().sum())
        for draw in range(1000)
    ]
    mean = sum(errors) / len(errors)
    assert mean == pytest.approx(2 * two_pass, rel=0.05)
    bounds = [(1 + s / (width - s - 1)) * float(values[s:].square().sum()) for s in range(width - 1)]
    assert mean < 2 * min(bounds)


def test_what_a_one_pass_refresh_cannot_do_is_named() -> None:
    with pytest.raises(ValueError, match=r"refresh.power_iterations must be 0 with refresh.method=one_pass, .* got 2"):
        RefreshRule(method="one_pass", power_iterations=2)
