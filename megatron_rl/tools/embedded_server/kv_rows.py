"""Assigns the rows of the KV cache to requests, keeps finished rows for prefix reuse, and resizes the cache.

A row is free, held by a running request, or kept with a finished request's keys, because later prompts may share its
prefix. A new request never reuses keys of earlier weights (an older epoch).
"""

from dataclasses import dataclass, field

from megatron_rl.tools.embedded_server.request import Request
from megatron_rl.tools.embedded_server.transformer import KVCache

MIN_PREFIX = 8
"""Minimum length of a reused prefix. Copying a shorter one costs more than computing it."""
MIN_CAPACITY = 64
NEVER = -1
"""Epoch of a row whose keys must not be reused."""


@dataclass(eq=False)
class Row:
    """One cache row, with the tokens of its running or finished request.

    Only the first `filled` tokens have keys and values.
    """

    tokens: list[int] = field(default_factory=list)
    filled: int = 0
    epoch: int = NEVER
    request: Request | None = None
    last_used: int = 0


@dataclass(frozen=True)
class Prefix:
    """The longest reusable prefix of a new request: `length` tokens of row `row`.

    more_is_coming: a running request will soon have computed a longer prefix, so the new request should wait for it.
    """

    row: int | None
    length: int
    more_is_coming: bool


class KVRows:
    """The table of the cache's rows. Only the batcher's thread uses it.

    For example:

        rows = KVRows(cache, max_rows=8, context_length=512, max_total_tokens=4096, reuse_prefixes=True)
        rows.resize(*rows.size_for(1, tokens=100, longest=0))
        rows.admit(request, rows.find_prefix(request))  # request.row, request.filled
        rows.copy_prefixes()
        rows.release(request, keep=True)
    """

    def __init__(
        self,
        cache: KVCache,
        *,
        max_rows: int,
        context_length: int,
        max_total_tokens: int,
        reuse_prefixes: bool,
        guessed_tokens: int = 0,
    ):
        """guessed_tokens: extra positions per row, for the tokens that a draft head guesses."""
        self.cache = cache
        self.max_rows = max_rows
        self.context_length = context_length
        self.longest_row = context_length + guessed_tokens
        self.max_total_tokens = max(max_total_tokens, self.longest_row)
        self.reuse_prefixes = reuse_prefixes
        self.epoch = 0
        """Number of weight updates."""
        self._rows: list[Row] = []
        self._clock = 0
        self._copies: list[tuple[int, int, list[int]]] = []

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Row:
        return self._rows[index]

    def forget_prefixes(self) -> None:
        for row in self._rows:
            row.epoch = NEVER

    def reset(self) -> None:
        self._rows = [Row() for _ in self._rows]
        self._copies.clear()

    # Size

    def free(self) -> None:
        """Free all memory of the cache. No request may be running. The cache grows again with the next requests."""
        self._rows.clear()
        self._copies.clear()
        self.cache.resize(0, 0, [])

    def size_for(self, rows: int, tokens: int, longest: int) -> tuple[int, int]:
        """Return the cache size (rows, capacity per row in tokens) for `rows` rows of `tokens` tokens.

        longest: number of tokens of the longest running request. If the size exceeds max_total_tokens, the capacity
        shrinks first, but not below `tokens` or `longest`. If that is not enough, the number of rows shrinks too.
        """
        # Sizes are powers of two, because a growing cache copies all its contents: so it grows only a few times.
        capacity = max(self.cache.capacity, self._capacity_for(tokens))
        wanted = max(len(self), min(_power_of_two(rows), self.max_rows))
        if wanted * capacity > self.max_total_tokens:
            capacity = self._capacity_for(max(tokens, longest))
            wanted = min(wanted, self.max_total_tokens // capacity)
        return wanted, capacity

    def _capacity_for(self, tokens: int) -> int:
        return min(_power_of_two(max(tokens, MIN_CAPACITY)), self.longest_row)

    def resize(self, rows: int, capacity: int) -> None:
        """Resize the cache. Rows of running requests come first, then the most recently used kept rows that fit."""
        self.copy_prefixes()
        running = [i for i, row in enumerate(self._rows) if row.request]
        kept = [i for i, row in enumerate(self._rows) if not row.request and row.epoch == self.epoch]
        kept = [i for i in kept if self._rows[i].filled <= capacity]
        order = [*running, *sorted(kept, key=lambda i: -self._rows[i].last_used)][:rows]
        self.cache.resize(rows, capacity, [(old, new, self._rows[old].filled) for new, old in enumerate(order)])
        self._rows = [self._rows[old] for old in order] + [Row() for _ in range(rows - len(order))]
        for index, row in enumerate(self._rows):
            if row.request is not None:
                row.request.row = index

    # Admission and release

    def find_prefix(self, request: Request) -> Prefix:
        # Always compute the last token, and the tokens whose log-probabilities were requested.
        limit = len(request.tokens) - 1
        if request.next_score is not None:
            limit = min(limit, request.next_score)
        if not self.reuse_prefixes or limit < MIN_PREFIX:
            return Prefix(None, 0, False)
        best, best_length, coming = None, 0, 0
        for index, row in enumerate(self._rows):
            if row.epoch != self.epoch:
                continue
            common = _common_prefix(row.tokens, request.tokens, limit)
            length = min(common, row.filled)
            # If equal, prefer a finished row: the request can take it over without a copy.
            if length >= MIN_PREFIX and (length > best_length or (length == best_length and row.request is None)):
                best, best_length = index, length
            if row.request is not None:
                coming = max(coming, min(common, len(row.tokens) - 1))
        # Always wait for a request that is computing this whole prompt, such as the first sample of a group.
        waits = coming > best_length and (coming == limit or coming >= best_length + MIN_PREFIX)
        return Prefix(best, best_length, waits)

    def admit(self, request: Request, prefix: Prefix) -> None:
        """Give the request a row. The row holds the prefix only after `copy_prefixes`."""
        if prefix.row is not None and self._rows[prefix.row].request is None:
            index = prefix.row
        else:
            # Prefer a row whose keys are useless, then the least recently used one.
            free = [i for i, row in enumerate(self._rows) if row.request is None]
            index = min(free, key=lambda i: (self._rows[i].epoch == self.epoch, self._rows[i].last_used, i))
        if prefix.row not in (None, index):
            # Keep the order: the source of one copy may be the target of a later one.
            if not self._copies or self._copies[-1][:2] != (prefix.row, prefix.length):
                self._copies.append((prefix.row, prefix.length, []))
            self._copies[-1][2].append(index)
        request.row, request.filled, request.drafted = index, prefix.length, prefix.length
        row = self._rows[index]
        row.tokens, row.filled, row.epoch, row.request = request.tokens, prefix.length, self.epoch, request

    def copy_prefixes(self) -> None:
        # One copy serves all samples of a group, which is the usual case.
        for source, length, targets in self._copies:
            self.cache.copy_prefix(source, targets, length)
        self._copies.clear()

    def advance(self, request: Request, count: int) -> None:
        """Record that the keys of `count` more tokens are in the request's row."""
        request.filled += count
        self._rows[request.row].filled = request.filled

    def release(self, request: Request, *, keep: bool) -> None:
        """Take the request out of its row. keep: True if later requests may reuse the row's keys for a prefix."""
        row = self._rows[request.row]
        self._clock += 1
        row.request, row.last_used = None, self._clock
        row.tokens = request.tokens[: request.filled]
        if not keep:
            row.epoch = NEVER
        request.row = None

    def wipe(self, request: Request) -> None:
        """Zero the row of a request that produced NaN: the next request needs finite values at masked positions."""
        self.cache.clear_row(request.row)
        self._rows[request.row].epoch = NEVER


def _power_of_two(value: int) -> int:
    return 1 << max(0, value - 1).bit_length()


def _common_prefix(a: list[int], b: list[int], limit: int) -> int:
    """Return the length of the common prefix, at most `limit`. Uses bisection, because slices are compared in C."""
    low, high = 0, min(len(a), limit)
    if a[:high] == b[:high]:
        return high
    while low < high:
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
