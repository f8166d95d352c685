"""What would leave a client unclipped is refused with its path and remedy; the remedies work."""

import copy

import pytest
import torch
from torch import nn
from torch.func import functional_call, vmap

from fedflat.core.checks import InputError
from fedflat.models import freeze_batch_norm, refuse_unclipped_state

torch.set_num_threads(1)
X = torch.randn(6, 3, 5, 5, generator=torch.Generator().manual_seed(0)) * 2 + 1


def with_batch_norm() -> nn.Module:
    module = nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.Sequential(nn.BatchNorm2d(4), nn.ReLU()), nn.Flatten(), nn.BatchNorm1d(36, affine=False)
    )
    for _ in range(3):
        module(X)
    return module


def refusal(module: nn.Module, example: torch.Tensor = X) -> str:
    with pytest.raises(InputError) as error:
        refuse_unclipped_state(module, example)
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize("training", [True, False])
def test_batch_norm_is_refused_with_path_reason_and_remedy(training: bool) -> None:
    message = refusal(with_batch_norm().train(training))
    assert "model: 1.0 is BatchNorm2d with running statistics" in message
    assert "would leave every client unclipped" in message
    assert "group norm" in message
    assert "fedflat.models.freeze_batch_norm(module)" in message


def test_other_running_statistics_are_refused() -> None:
    assert "InstanceNorm2d" in refusal(
        nn.Sequential(nn.InstanceNorm2d(3, track_running_stats=True), nn.Conv2d(3, 1, 1))
    )
    assert "the module itself is BatchNorm2d" in refusal(nn.BatchNorm2d(3))


@pytest.mark.parametrize(
    ("module", "words"),
    [
        (nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(5, 2))), "is changed by a forward pass"),
        (nn.Sequential(nn.LazyLinear(2)), "model: 0.weight: found a lazy tensor"),
        (nn.Flatten(), "no trainable parameter"),
        (nn.Linear(5, 2).requires_grad_(False), "no trainable parameter"),
        (nn.Linear(5, 2, dtype=torch.complex64), "model: weight: found trainable parameter of type torch.complex64"),
        (nn.Linear(4, 2), "a module that takes a batch of shape (6, 3, 5, 5)"),
    ],
)
def test_other_refusals(module: nn.Module, words: str) -> None:
    assert words in refusal(module)


def test_the_check_changes_nothing_and_accepts_dropout_and_constant_buffers() -> None:
    module = nn.Sequential(nn.Linear(5, 2), nn.Dropout(0.5)).eval()
    module.register_buffer("constant", torch.tensor([float("nan"), 1.0]))
    before, state = copy.deepcopy(module.state_dict()), torch.get_rng_state()
    refuse_unclipped_state(module, X)
    assert not module.training
    assert torch.equal(state, torch.get_rng_state())
    assert all(torch.equal(before[k].nan_to_num(), v.nan_to_num()) for k, v in module.state_dict().items())


def test_batch_norm_without_running_statistics_has_no_state() -> None:
    refuse_unclipped_state(nn.BatchNorm2d(3, track_running_stats=False), X)


def test_a_module_that_needs_two_rows_is_refused_before_training() -> None:
    module = nn.Sequential(nn.Flatten(), nn.BatchNorm1d(X[0].numel(), track_running_stats=False))
    with pytest.raises(InputError, match=r"Expected more than 1 value.*a batch of shape .1,"):
        refuse_unclipped_state(module, X)


def test_freezing_equals_evaluation_mode_and_nothing_moves() -> None:
    module = with_batch_norm()
    frozen = freeze_batch_norm(module)
    refuse_unclipped_state(frozen, X)
    expected = module.eval()(X)
    for training in (True, False):
        torch.testing.assert_close(frozen.train(training)(X), expected)
    assert [n for n, _ in frozen.named_parameters()] == [n for n, _ in module.named_parameters()]
    frozen.load_state_dict(module.state_dict(), strict=False)
    assert isinstance(module[1][0], nn.BatchNorm2d)


def test_frozen_norms_train_their_weights_and_do_not_share_them_with_the_original() -> None:
    module = with_batch_norm()
    frozen = freeze_batch_norm(module)
    frozen(X).square().sum().backward()
    assert frozen[1][0].weight.grad is not None
    assert module[1][0].weight.grad is None
    assert frozen[1][0].weight is not module[1][0].weight


def test_frozen_norms_work_under_vmap() -> None:
    module = freeze_batch_norm(with_batch_norm())
    parameters = {k: torch.stack([v.detach(), v.detach() + 1]) for k, v in module.named_parameters()}
    both = vmap(lambda p: functional_call(module, p, (X,)))(parameters)
    torch.testing.assert_close(both[0], module(X))
    assert not torch.equal(both[0], both[1])
    each = vmap(lambda p, x: functional_call(module, p, (x,)))(parameters, torch.stack([X, X]))
    torch.testing.assert_close(each, both)


def test_freezing_keeps_shared_norms_shared_and_replaces_a_norm_alone() -> None:
    norm = nn.BatchNorm2d(3)
    norm(X)
    twice = freeze_batch_norm(nn.Sequential(norm, nn.ReLU(), norm))
    assert twice[0] is twice[2]
    torch.testing.assert_close(freeze_batch_norm(norm)(X), norm.eval()(X))


def test_a_lazy_batch_norm_cannot_be_frozen() -> None:
    with pytest.raises(InputError, match="a lazy tensor without a shape"):
        freeze_batch_norm(nn.Sequential(nn.LazyBatchNorm2d()))
