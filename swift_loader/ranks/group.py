"""The ranks of one node that need the same data, as they have found each other. Pure."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Group", "Member", "Offer"]


@dataclass(frozen=True, slots=True)
class Offer:
    """What a rank says to those that may share its batches."""

    node: str
    """Equal for ranks that can share memory."""
    pid: int
    address: str
    """Where the rank listens for others that need the same data."""


@dataclass(frozen=True, slots=True)
class Member:
    """A rank of a group."""

    process: int
    """Its rank in torch.distributed."""
    offer: Offer


@dataclass(frozen=True, slots=True)
class Group:
    """At least two ranks of one node that need the same data. The first one loads it for all."""

    members: tuple[Member, ...]
    """By rank."""
    process: int
    """This rank."""

    @property
    def leader(self) -> Member:
        """The rank that loads."""
        return self.members[0]

    @property
    def followers(self) -> tuple[Member, ...]:
        """The ranks that get what the leader loads."""
        return self.members[1:]

    @property
    def is_leader(self) -> bool:
        """Whether this rank loads."""
        return self.process == self.leader.process
