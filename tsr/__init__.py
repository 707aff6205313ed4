"""Communication-efficient low-rank optimizers for data-parallel training.

    from tsr import TSR, Communicator

    optimizer = TSR(model, lr=0.01, rank={"linear": 128}, communicator=Communicator(dtype="fp32"))
    loss.backward()         # gradients stay local: no DDP wrapper around the model
    optimizer.step()        # sends what the method needs, and nothing else
    optimizer.communicator.ledger.last.total  # bytes of this step

Notation. A block is a trainable parameter; a matrix block W is m x n with local gradient G_i on worker i of N and
mean gradient G. Its basis is U (m x r) and V (n x r), orthonormal; its core C = U^T G V is r x r. A refresh makes a new
basis every K steps from a sketch Y = G Omega with k = r + p columns (oversampling p). Steps are counted from 1. Payload
is what one worker hands to a collective, an all-reduce counted once; bytes are numel x itemsize on the wire.

`blocks` says which parameter is what, `subspace` is the algebra, `refresh` when and how bases change, `communicator`
the only caller of collectives, `ledger` what they cost, `optimizer` the step, `methods` the rows of choices,
`accounting` the closed forms. The package imports nothing of the project around it; its subpackage `tsr.harness` holds
what a training job needs besides an optimizer.
"""

from tsr.blocks import Block, RolePolicy, plan_blocks, roles_by_module
from tsr.communicator import Communicator, Message
from tsr.ledger import Ledger, Traffic
from tsr.methods import TSR, TSRSVD, AdamW, GaLore, OneSided, TSRPaper, build
from tsr.optimizer import AdamOptions, LowRankAdam
from tsr.refresh import RefreshRule

__all__ = [
    "TSR",
    "TSRSVD",
    "AdamOptions",
    "AdamW",
    "Block",
    "Communicator",
    "GaLore",
    "Ledger",
    "LowRankAdam",
    "Message",
    "OneSided",
    "RefreshRule",
    "RolePolicy",
    "TSRPaper",
    "Traffic",
    "build",
    "plan_blocks",
    "roles_by_module",
]
