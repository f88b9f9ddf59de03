# SPDX-License-Identifier: Apache-2.0
"""What each instruction of a compiled program is: its class, the line of code it is from, its FLOPs and bytes."""

from typing import NamedTuple

from rehearsal import hlo, roofline
from rehearsal.assumptions import Assumptions
from rehearsal.estimate import pass_of
from rehearsal.schedule import Prices, label

UNKNOWN = "unknown"
CONTROL = ("while", "conditional", "call")  # their time is that of the instructions within them


class Kind(NamedTuple):
    """What an instruction is.

    Attributes:
      category: as in a rehearsal: matmul, attention kernel, kernel, element-wise, collective or copy; "" for CONTROL,
        UNKNOWN for an instruction that the program does not have.
      name: the last parts of its name in jax.
      source: file:line in this workspace, "" if unknown.
      part: forward, backward, recomputed or update.
      flops, bytes: of one execution, from the shapes.
    """

    category: str
    name: str
    source: str
    part: str
    flops: float
    bytes: float


class Program:
    """A compiled program with the rates of its hardware; `name` is that of the HLO module."""

    def __init__(self, text: str, given: Assumptions, mesh: dict[str, int]):
        """Read the text of `compiled.as_text()`."""
        self.name = text.partition("HloModule ")[2].partition(",")[0].split()[0]
        self.module = hlo.parse(text)
        self._prices = Prices(self.module, given, mesh)
        self._kinds: dict[str, Kind] = {}
        self._by_name = {i.name: i for body in self.module.computations.values() for i in body}

    def kind(self, name: str) -> Kind:
        """Return what an instruction is; each is looked up once."""
        if name not in self._kinds:
            self._kinds[name] = self._kind(name)
        return self._kinds[name]

    def _kind(self, name: str) -> Kind:
        instruction = self._by_name.get(name)
        if instruction is None or instruction.opcode in CONTROL:
            return Kind("" if instruction else UNKNOWN, name, "", "", 0.0, 0.0)
        begun = self._begun(instruction)
        price = self._prices.of(begun)
        counted = (price.flops, price.bytes) if begun is instruction else (0.0, 0.0)
        return Kind(price.category, label(begun), self.module.source(begun), pass_of(begun), *counted)

    def _begun(self, instruction: hlo.Instruction) -> hlo.Instruction:
        """Return the instruction that a `-done` waits for, and the collective within an `async-start` or a fusion."""
        while instruction.opcode.endswith(("-done", "-update")) and instruction.operands:
            instruction = self.module.operands(instruction)[0]
        computes = instruction.opcode == "fusion" and roofline.flops(self.module, instruction)
        return instruction if computes else self.module.wrapped(instruction)
