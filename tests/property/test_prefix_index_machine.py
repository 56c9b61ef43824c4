"""The index against plain sets: whatever is stored, removed and retired in whatever order."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from pagoda.cluster.directory.index import PrefixIndex, Tier, slot_bit
from pagoda.worker.block_hash import HASH_BYTES

NUM_KEYS = 6
KEYS = [bytes([17 * number] * HASH_BYTES) for number in range(NUM_KEYS)]
WORKERS = st.integers(0, 3)
TIERS = st.sampled_from(Tier)
NUMBERS = st.lists(st.integers(0, NUM_KEYS - 1), max_size=NUM_KEYS)


class PrefixIndexMachine(RuleBasedStateMachine):
    @initialize(windows=st.lists(st.integers(0, 3), min_size=1, max_size=3))
    def begin(self, windows: list[int]) -> None:
        self.windows = windows
        self.index = PrefixIndex(windows)
        self.slots: dict[int, int] = {}
        self.held: dict[int, set[tuple[Tier, int, int]]] = {}

    @rule(worker=WORKERS)
    def start_anew(self, worker: int) -> None:
        if worker in self.slots:
            self.index.retire_slot(self.slots[worker])
        self.slots[worker] = self.index.add_slot()
        self.held[worker] = set()

    @rule(worker=WORKERS)
    def leave(self, worker: int) -> None:
        if worker in self.slots:
            self.index.retire_slot(self.slots.pop(worker))
            del self.held[worker]

    @rule(num_steps=st.integers(1, 400))
    def sweep(self, num_steps: int) -> None:
        for _ in range(num_steps):
            self.index.sweep()

    @rule(worker=WORKERS, tier=TIERS, numbers=NUMBERS, group=st.integers(0, 2), is_stored=st.booleans())
    def change(self, worker: int, tier: Tier, numbers: list[int], group: int, is_stored: bool) -> None:
        if worker not in self.slots:
            return
        group %= len(self.windows)
        change = self.index.store if is_stored else self.index.remove
        change(self.slots[worker], tier, group, b"".join(KEYS[number] for number in numbers))
        keys = {(tier, group, number) for number in numbers}
        self.held[worker] = self.held[worker] | keys if is_stored else self.held[worker] - keys

    @rule(predicted=st.lists(st.tuples(WORKERS, st.integers(0, NUM_KEYS - 1)), max_size=4), left_out=WORKERS)
    def match(self, predicted: list[tuple[int, int]], left_out: int) -> None:
        guesses: dict[bytes, int] = {}
        for worker, number in predicted:
            if worker in self.slots:
                guesses[KEYS[number]] = guesses.get(KEYS[number], 0) | slot_bit(self.slots[worker])
        candidates = sum(slot_bit(slot) for worker, slot in self.slots.items() if worker != left_out)
        match = self.index.match(KEYS, candidates, (guesses,))
        for worker, slot in self.slots.items():
            held = set(self.held[worker])
            for number in range(NUM_KEYS):
                if guesses.get(KEYS[number], 0) & slot_bit(slot):
                    held |= {(Tier.DEVICE, group, number) for group in range(len(self.windows))}
            depth, lower = (0, {}) if worker == left_out else longest(held, self.windows)
            assert match.num_blocks.get(slot, 0) == depth
            assert match.num_lower.get(slot, {}) == lower

    @invariant()
    def counts_are_right(self) -> None:
        for worker, slot in self.slots.items():
            expected = [sum(tier is each for each, _, _ in self.held[worker]) for tier in Tier]
            assert list(self.index.num_held(slot)) == expected
            for tier in Tier:
                keys = {(group, KEYS.index(key)) for group, key in self.index.keys_of(slot, tier)}
                assert keys == {(group, number) for each, group, number in self.held[worker] if each is tier}
        if self.index.is_swept:
            assert self.index.num_entries == len({key[1:] for held in self.held.values() for key in held})

    def teardown(self) -> None:
        while self.index.sweep():
            pass
        self.counts_are_right()
        assert self.index.is_swept


def longest(held: set[tuple[Tier, int, int]], windows: list[int]) -> tuple[int, dict[Tier, int]]:
    """The longest boundary before which every group has what it needs; and blocks that come from lower tiers."""
    nearest = {(group, number): min(t for t, g, n in held if (g, n) == (group, number)) for _, group, number in held}
    for depth in range(NUM_KEYS, 0, -1):
        needed = [
            (group, number)
            for group, window in enumerate(windows)
            for number in range(max(0, depth - window) if window else 0, depth)
        ]
        if all(key in nearest for key in needed):
            tiers = [
                max((nearest[key] for key in needed if key[1] == number), default=Tier.DEVICE)
                for number in range(depth)
            ]
            return depth, {tier: tiers.count(tier) for tier in Tier if tier and tiers.count(tier)}
    return 0, {}


TestPrefixIndex = PrefixIndexMachine.TestCase
TestPrefixIndex.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
