"""The interface of recurrent critics, which value any action after the observations of a sequence."""

from typing import Protocol, runtime_checkable

from jaxtyping import Array, Float

from polyak.core.types import PyTree, RecurrentNetwork, Variables


@runtime_checkable
class RecurrentCritics(RecurrentNetwork, Protocol):
    """Critics whose recurrent state is a function of observations alone, such as `LSTM(head=Critics())`.

    The action joins what the recurrent part returns. So a sequence is unrolled once, and any action can be valued at each of
    its time steps: the recorded one, and the actor's. Critics have a recurrent part of their own, beside the actor's.

    Source: Ni et al. 2022, arXiv:2110.05038.
    """

    @property
    def core(self) -> RecurrentNetwork:
        """The recurrent part, with the variables of the whole: a function of observations, which returns features."""
        ...

    def critic_values(self, variables: Variables, features: PyTree, action: PyTree) -> Float[Array, "B N *M"]:
        """The values from features of `core`, and actions."""
        ...
