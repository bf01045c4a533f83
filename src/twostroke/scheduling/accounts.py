"""What each client was served: the scheduler takes turns between clients by it."""

from __future__ import annotations

OUTPUT_WEIGHT = 2
"""A generated token counts as two tokens of a prompt, because it takes a step of its own while a prompt's tokens share one
(Sheng et al. 2024, "Fairness in Serving Large Language Models", arXiv:2401.00588, section 5)."""


class Account:
    """The service that one client received: ``served`` = prompt tokens computed + ``OUTPUT_WEIGHT`` · tokens generated.

    Sheng et al. call it the client's virtual token counter."""

    __slots__ = ("client", "n_open", "served")

    def __init__(self, client: str) -> None:
        self.client = client
        self.served = 0
        self.n_open = 0  # unfinished requests


class Accounts:
    """Accounts of the clients with unfinished requests. A client's account is deleted with its last one, which bounds their
    number.

    A client that arrives, or returns, starts at the smallest ``served`` of the others. Starting at 0 would let it take all of
    the budget until it had caught up with them.
    """

    def __init__(self) -> None:
        self._of: dict[str, Account] = {}

    def open(self, client: str) -> Account:
        """The account of ``client``, made if necessary; it counts one request more."""
        account = self._of.get(client)
        if account is None:
            least = min((other.served for other in self._of.values()), default=0)
            account = self._of[client] = Account(client)
            account.served = least
        account.n_open += 1
        return account

    def close(self, account: Account) -> None:
        """One request of ``account`` has finished."""
        account.n_open -= 1
        if account.n_open == 0:
            del self._of[account.client]

    def __len__(self) -> int:
        return len(self._of)
