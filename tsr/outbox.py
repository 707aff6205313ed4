"""The messages of a step, less those of refreshes: cores and dense gradients, sent while backward goes on.

They are one round of communication, in the order in which backward completes them, last block first, save for the cores
of blocks that refresh in the step, which come last; where a refresh derives the core, there is none. With the number of
backward passes of a step announced, two things can happen as soon as a gradient is there: it is projected, added to its
block's core (or to the samples that a one-pass refresh takes) and freed, so that no more than one dense gradient of
such blocks is alive at a time; and, after the last pass, its message is put into the round, whose full buckets leave at
once. Neither changes what is sent.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from functools import partial

from torch import Tensor

from tsr.blocks import Block
from tsr.communicator import Announced, Communicator, Round
from tsr.refresh import Samples
from tsr.stacks import Stack

Places = Mapping[Block, tuple[Stack, int]]


class Outbox:
    """The round of a step's cores and dense gradients.

    Args:
        blocks: All blocks, in the order of the model.
        places: Of the low-rank ones among them.
        whole: Send the gradients of low-rank blocks, too, rather than their cores.
        accumulate: Accumulate cores over the passes of a step, rather than gradients.
    """

    def __init__(
        self, blocks: Sequence[Block], places: Places, communicator: Communicator, *, whole: bool, accumulate: bool
    ) -> None:
        assert not (whole and accumulate)
        self._blocks, self._places, self._communicator = blocks, places, communicator
        self._whole, self._accumulate = whole, accumulate
        self._round: Round | None = None
        self._order: dict[Block, int] = {}
        self._due: dict[Block, None] = {}  # in order, less those with samples
        self.samples: Mapping[Block, Samples] = {}  # of the step under way, by the blocks that take them
        self._passes: int | None = None
        self._seen: Counter[Block] = Counter()
        self._sent: set[Block] = set()
        if accumulate or communicator.overlap:
            for block in blocks:
                block.parameter.register_post_accumulate_grad_hook(partial(self._gradient_is_there, block))

    @property
    def is_open(self) -> bool:
        """Whether a step is under way."""
        return self._round is not None

    def open(self, due: Collection[Block], *, samples: Mapping[Block, Samples], passes: int | None) -> None:
        """Begin a step in which the blocks ``due`` refresh; ``passes`` are its backward passes, None if unknown.

        Blocks with ``samples`` send these elsewhere and nothing in this round.
        """
        self._passes = passes
        self.samples = samples
        self._seen.clear()
        self._sent.clear()
        self._due = dict.fromkeys(() if self._whole else (block for block in due if block not in samples))
        last_first = [block for block in reversed(self._blocks) if block not in self._due and block not in samples]
        self._order = {block: index for index, block in enumerate([*last_first, *self._due])}
        if self._accumulate:
            for stack in {id(stack): stack for stack, _ in self._places.values()}.values():
                stack.core.zero_()
        self._round = self._communicator.open(
            [
                Announced(self._elements(block), "dense" if self._sends_gradient(block) else "core", block.kind)
                for block in self._order
            ]
        )

    def is_accumulated(self, block: Block) -> bool:
        """Whether the block's core or samples, and not its gradient, are what the passes of this step leave."""
        return self._accumulate and self._passes is not None and block in self._places and block not in self._due

    def accumulated(self, block: Block) -> Tensor:
        """What is left of the block's gradients so far, if `is_accumulated`."""
        if block in self.samples:
            return self.samples[block].flat
        stack, index = self._places[block]
        return stack.core[index]

    def send(self, *, refreshed: bool) -> None:
        """Project and put in all that is not there yet; without ``refreshed``, less the blocks that are due."""
        rest = [block for block in self._order if block not in self._sent and (refreshed or block not in self._due)]
        project(
            [block for block in rest if not self._sends_gradient(block) and not self.is_accumulated(block)],
            self._places,
        )
        for block in rest:
            self._put(block)

    def finish(self) -> None:
        """Wait for the means, which are then in the gradients and cores."""
        assert self._round is not None
        self._round.finish()
        self._round = None
        self.samples = {}

    def _gradient_is_there(self, block: Block, parameter: Tensor) -> None:
        """Called by autograd after every pass that reaches the block."""
        if self._round is None or self._passes is None:
            return
        self._seen[block] += 1
        if self._seen[block] > self._passes:
            raise RuntimeError(
                f"backward has reached {block.name} {self._seen[block]} times, but begin() announced {self._passes} "
                f"passes"
            )
        if block in self._due:
            return
        complete = self._communicator.overlap and self._seen[block] == self._passes and block not in self.samples
        if self.is_accumulated(block):
            self._add(block)
            parameter.grad = None
        elif complete and not self._sends_gradient(block):
            project([block], self._places)
        if complete:
            self._put(block)

    def _add(self, block: Block) -> None:
        """Add what is kept of the block's gradient to what the passes before have left."""
        stack, index = self._places[block]
        if block in self.samples:
            self.samples[block].add(stack.gradient(index))
        else:
            stack.add_projected(index)

    def _put(self, block: Block) -> None:
        assert self._round is not None
        gradient = block.parameter.grad
        if self._sends_gradient(block):
            assert gradient is not None
            self._round.put(self._order[block], gradient)
        else:
            stack, index = self._places[block]
            self._round.put(self._order[block], stack.core[index])
        self._sent.add(block)

    def _sends_gradient(self, block: Block) -> bool:
        return self._whole or not block.is_low_rank

    def _elements(self, block: Block) -> int:
        if self._sends_gradient(block):
            return block.parameter.numel()
        stack, index = self._places[block]
        return stack.core[index].numel()


def project(blocks: Collection[Block], places: Places) -> None:
    """Write the cores of these blocks' gradients into their stacks, each stack at once where all of it is there."""
    by_stack: dict[int, list[int]] = {}
    stacks: dict[int, Stack] = {}
    for block in blocks:
        stack, index = places[block]
        stacks[id(stack)] = stack
        by_stack.setdefault(id(stack), []).append(index)
    for key, indices in by_stack.items():
        stacks[key].project(sorted(indices))
