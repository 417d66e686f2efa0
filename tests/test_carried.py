"""What was computed from one batch has no part in the losses of the next, by whomever it was kept; what only looks on is nobody's business."""

import collections
import dataclasses

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import clipwise as cw
from training_helpers import data, losses_of, small, training


class Centred(nn.Module):
    """A criterion with a statistic of the last batch, which nobody handed to the training."""

    def __init__(self):
        super().__init__()
        self.register_buffer("centre", torch.zeros(3))

    def forward(self, output):
        losses = (output - self.centre).square().sum(1)
        with torch.no_grad():
            self.centre = output.detach().mean(0)
        return losses


@dataclasses.dataclass
class Kept:
    value: torch.Tensor


def queue():
    """Features of earlier batches, as negatives."""
    kept = [torch.zeros(4, 3, dtype=torch.float64)]

    def losses(model, x, y):
        output = model(x)
        found = F.softplus((output @ kept[0].t()).mean(1)) + F.cross_entropy(output, y, reduction="none")
        kept[0] = torch.cat([output.detach(), kept[0]])[:4]
        return found

    return losses


def mean_of_losses():
    kept = {"mean": torch.ones(())}

    def losses(model, x, y):
        found = losses_of(model, x, y)
        weighed = found / kept["mean"]
        kept["mean"] = 0.9 * kept["mean"] + 0.1 * found.detach().mean()
        return weighed

    return losses


def bank():
    """Written into in place."""
    kept = torch.zeros(8, 3)

    def losses(model, x, y):
        output = model(x)
        found = (output - kept.mean(0)).square().sum(1)
        kept[: len(output)] = output.detach()[:8]
        return found

    return losses


def changed_after_use(write):
    """What a criterion does: the losses first, then its statistic, and only then are they handed in."""

    def made():
        centre = torch.zeros(3, dtype=torch.float64)

        def losses(model, x, y):
            output = model(x)
            found = (output - centre).square().sum(1)
            write(centre, output.detach())
            return found

        return losses

    return made


def by_another_name(same):
    """A conversion that converts nothing returns the tensor itself."""

    def made():
        kept = [torch.zeros(3, dtype=torch.float64)]

        def losses(model, x, y):
            output = model(x)
            found = (output - same(kept[0])).square().sum(1)
            kept[0] = output.detach().mean(0)
            return found

        return losses

    return made


def in_the_model(make, read, write):
    def losses(model, x, y):
        if not hasattr(model, "kept"):
            model.kept = make(torch.zeros(3))
            before = model.forward

            def forward(x):
                output = before(x)
                found = output - read(model.kept)
                write(model.kept, output.detach().mean(0))
                return found

            model.forward = forward
        return losses_of(model, x, y)

    return lambda: losses


CARRIED = {
    "queue": queue,
    "mean of losses": mean_of_losses,
    "bank": bank,
    "criterion": lambda: (lambda criterion: lambda model, x, y: criterion(model(x)))(Centred()),
    "copied before the losses are handed in": changed_after_use(lambda centre, output: centre.copy_(0.9 * centre + 0.1 * output.mean(0))),
    "filled": changed_after_use(lambda centre, output: centre.fill_(0.0).add_(output.mean(0))),
    "one place": changed_after_use(lambda centre, output: centre[0].copy_(output.mean())),
    "through a view": changed_after_use(lambda centre, output: centre.view(-1)[:2].copy_(output.mean(0)[:2])),
    "out": changed_after_use(lambda centre, output: torch.mean(output, 0, out=centre)),
    "data": changed_after_use(lambda centre, output: setattr(centre, "data", output.mean(0))),
    "to": by_another_name(lambda kept: kept.to("cpu")),
    "double": by_another_name(lambda kept: kept.double()),
    "contiguous": by_another_name(lambda kept: kept.contiguous()),
    "deque": in_the_model(lambda value: collections.deque([value], maxlen=1), lambda kept: kept[0], lambda kept, value: kept.append(value)),
    "object": in_the_model(Kept, lambda kept: kept.value, lambda kept, value: setattr(kept, "value", value)),
}


def counted():
    """Numbers to show, and predictions to look at later."""
    kept = {"right": torch.zeros(()), "losses": torch.zeros(()), "seen": []}

    def losses(model, x, y):
        output = model(x)
        kept["right"] += (output.argmax(1) == y).sum()
        found = F.cross_entropy(output, y, reduction="none")
        kept["losses"] = 0.9 * kept["losses"] + found.detach().mean()
        kept["seen"].append(output.detach())
        return found

    return losses


def scratch():
    kept = torch.zeros(64, 3)

    def losses(model, x, y):
        output = model(x)
        weights = kept[: len(output)]
        weights.copy_(output.detach().abs() + 1)
        return (output / weights).square().sum(1)

    return losses


def vouched_for():
    kept = [torch.zeros(3)]

    def losses(model, x, y):
        output = model(x)
        found = (output - kept[0]).square().sum(1)
        kept[0] = cw.constant(torch.zeros_like(output.detach()).sum(0))
        return found

    return losses


def cached():
    """Made on first use, of nothing that came from examples."""
    kept = []

    def losses(model, x, y):
        output = model(x)
        if not kept:
            kept.append(torch.tensor([1, 2, 3]).double().reciprocal())
        return F.cross_entropy(output, y, reduction="none", weight=kept[0])

    return losses


def averaged_weights():
    """A teacher that follows the model, moved between the forward pass and the losses."""
    teacher = small().requires_grad_(False)

    def losses(model, x, y):
        output = model(x)
        with torch.no_grad():
            for mine, theirs in zip(teacher.parameters(), model.parameters()):
                mine.mul_(0.9).add_(theirs, alpha=0.1)
            targets = teacher(x).softmax(1)
        return F.cross_entropy(output, targets, reduction="none")

    return losses


def sparsity_in_a_hook():
    """A running number that somebody looks at."""
    kept = {"zeros": torch.zeros(())}

    def count(module, given, output):
        kept["zeros"] = 0.9 * kept["zeros"] + 0.1 * (output.detach() == 0).double().mean()

    def losses(model, x, y):
        if not model[1]._forward_hooks:
            model[1].register_forward_hook(count)
        return losses_of(model, x, y)

    return losses


HARMLESS = {
    "counted": counted,
    "scratch": scratch,
    "vouched for": vouched_for,
    "cached": cached,
    "averaged weights": averaged_weights,
    "sparsity in a hook": sparsity_in_a_hook,
}


def run(losses, steps=6):
    private, model, optimizer = training()
    for x, y in private.loader(data()):
        private.loss(losses(model, x, y)).backward()
        optimizer.step()
        optimizer.zero_grad()
        steps -= 1
        if not steps:
            break
    private.close()


@pytest.mark.parametrize("name", CARRIED)
def test_what_one_batch_leaves_has_no_part_in_the_next(name):
    with pytest.raises(cw.StateWrite, match="of an earlier batch"):
        run(CARRIED[name]())


@pytest.mark.parametrize("name", HARMLESS)
def test_what_only_looks_on_is_not_refused(name):
    run(HARMLESS[name]())


def test_nor_have_microbatches_of_one_draw():
    private, model, optimizer = training()
    criterion = Centred()
    with pytest.raises(cw.StateWrite, match="of an earlier batch"):
        for batch in private.loader(data()):
            for x, _ in cw.microbatches(batch, 2):
                private.loss(criterion(model(x))).backward()
            optimizer.step()
            optimizer.zero_grad()
    private.close()


def test_a_batch_that_is_tried_again_may_use_what_it_computed():
    """Its losses were never handed in."""
    private, model, optimizer = training()
    x, y = next(iter(private.loader(data())))
    kept = model(x).detach()
    output = model(x)
    private.loss(F.cross_entropy(output, y, reduction="none") + (output - kept).square().sum(1)).backward()
    optimizer.step()
    private.close()


def test_a_draw_that_is_given_up_and_tried_again_may_use_what_was_computed_of_it():
    private, model, optimizer = training()
    x, _ = next(iter(private.loader(data())))
    output = model(x)
    targets = output.detach().softmax(1)
    private.loss(F.cross_entropy(output, targets, reduction="none")).backward()
    private.discard()
    private.loss(F.cross_entropy(model(x), targets, reduction="none")).backward()
    optimizer.step()
    private.close()


@pytest.mark.parametrize("draw", [True, False])
def test_but_no_other_draw_may(draw):
    """One that was given up for good, or was made after all."""
    private, model, optimizer = training()
    batches = iter(private.loader(data()))
    x, y = next(batches)
    output = model(x)
    kept = output.detach().mean(0)
    private.loss(F.cross_entropy(output, y, reduction="none")).backward()
    private.discard(draw=draw)
    if not draw:
        private.loss(losses_of(model, x, y)).backward()
        optimizer.step()
        optimizer.zero_grad()
    x, y = next(batches)
    with pytest.raises(cw.StateWrite, match="of an earlier batch"):
        private.loss((model(x) - kept).square().sum(1))
    private.close()


def test_each_training_knows_its_own():
    """Two models learn of each other's outputs for the same batch."""
    trainings = [training(own_batches=True) for _ in range(2)]
    x, y = data()[:12]
    for _ in range(4):
        outputs = [model(x) for _, model, _ in trainings]
        for mine, theirs, (private, _, optimizer) in zip(outputs, reversed(outputs), trainings):
            losses = F.cross_entropy(mine, y, reduction="none") + (mine - theirs.detach()).square().sum(1)
            private.loss(losses).backward()
            optimizer.step()
            optimizer.zero_grad()
        x = x.clone()
    for private, _, _ in trainings:
        private.close()


def test_outside_of_a_training_it_is_the_callers_business():
    model = small()
    kept = torch.zeros(3)
    for _ in range(3):
        x, y = data()[:5]
        with cw.capture(model) as tape:
            output = model(x)
            losses = F.cross_entropy(output - kept, y, reduction="none")
            kept = output.detach()[0] * 0
        cw.clipped_gradients(tape, losses, cw.flat(1.0))
