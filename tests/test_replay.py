"""Exact replay, its oracles and its three kinds of feedback, on logs small enough to enumerate."""

import copy
import itertools
import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specsel.logs import LogError, PositionLog, SpecselError, read_log
from specsel.policies.contextual import EXP4, Gate, LinTS, PerContext, Router
from specsel.policies.plain import (
    EXP3,
    UCB1,
    BetaThompson,
    EXP3Spec,
    Fixed,
    FixedShare,
    FollowTheLeader,
    GaussianThompson,
    Hedge,
    NormalHedge,
    Random,
    SlidingWindowUCB,
    UCBSpecPaper,
    UCBSpecReleased,
)
from specsel.replay import (
    Plan,
    Run,
    best_arms,
    fixed,
    follow,
    oracle_block,
    oracle_dp,
    oracle_plan,
    per_request,
    replay,
    replay_runs,
)
from specsel.replay.streams import Draws

CASES = Path(__file__).parent / "cases"


def hindsight(scope):
    """The replay of the best fixed arm of each request's scope."""
    return lambda log: follow(log, oracle_plan(log, f"best_fixed{scope}"))


oracle_fixed, oracle_workload, oracle_request = hindsight(""), hindsight("_workload"), hindsight("_request")


def replay_seeds(log, policy, seeds, feedback=None, **options):
    return replay_runs(log, [Run(policy, seed, feedback) for seed in seeds], **options)


def headroom(better, base):
    return better.block_efficiency / base.block_efficiency - 1


def log_of(requests, *, draft_len, match=None, workload=None):
    """A log from emitted counts: one array (T, K) per request, cut at the end of the output."""
    requests = [np.asarray(r) for r in requests]
    lengths = [len(r) for r in requests]
    starts = np.concatenate([[0], np.cumsum(lengths)])
    position = np.concatenate([np.arange(n) for n in lengths])
    remaining = np.concatenate([n - np.arange(n) for n in lengths])
    accepted = np.minimum(np.concatenate(requests) - 1, remaining[:, None]).astype(np.int16)
    n_arms = accepted.shape[1]
    workload = np.zeros(len(requests), dtype=int) if workload is None else np.asarray(workload)
    context = {} if match is None else {"match_length": np.concatenate([np.asarray(m, dtype=float) for m in match])}
    return PositionLog(
        tuple("abcdefgh"[:n_arms]),
        draft_len,
        tuple(f"w{i}" for i in range(workload.max() + 1)),
        tuple(f"r{i}" for i in range(len(requests))),
        workload,
        starts,
        np.full_like(accepted, draft_len),
        accepted,
        np.zeros(len(position), dtype=bool),
        position,
        remaining,
        context,
        {},
        None,
        True,
        "small",
        "SIM",
        None,
        "",
    )


ARMS = st.integers(1, 4)


@st.composite
def small_logs(draw, arms=ARMS):
    """At most 3 requests of at most 12 positions, emitted 1..L+1, cut at the end, with match lengths 0..3."""
    n_arms, draft_len = draw(arms), draw(st.integers(1, 5))
    lengths = draw(st.lists(st.integers(1, 12), min_size=1, max_size=3))
    counts = [
        draw(
            st.lists(st.lists(st.integers(1, draft_len + 1), min_size=n_arms, max_size=n_arms), min_size=n, max_size=n)
        )
        for n in lengths
    ]
    match = [draw(st.lists(st.integers(0, 3), min_size=n, max_size=n)) for n in lengths]
    return log_of(counts, draft_len=draft_len, match=match, workload=[i % 2 for i in range(len(lengths))])


def policies(n_arms):
    """One of each kind."""
    last = n_arms - 1
    return [
        Fixed(last),
        Random(),
        UCB1(),
        SlidingWindowUCB(window=3),
        UCBSpecPaper(),
        UCBSpecReleased(),
        EXP3(),
        EXP3Spec(),
        FollowTheLeader(),
        FollowTheLeader(discount=0.0),
        Hedge(),
        NormalHedge(),
        FixedShare(),
        GaussianThompson(),
        BetaThompson(),
        Gate("match_length", 2, last, 0),
        PerContext(FollowTheLeader(discount=0.5)),
        PerContext(Hedge(), backoff=2),
        LinTS(("scaled:match_length",)),
        EXP4((Fixed(0), Gate("match_length", 1, last, 0))),
        Router(("workload=1",), ((0.0,) * n_arms, tuple(map(float, range(n_arms)))), every=2),
    ]


def kinds_of(policy):
    return {"every arm": ["full", "delayed"], "either": ["bandit", "full", "delayed"]}.get(policy.sees, ["bandit"])


def runs_of(log, policy, **options):
    for feedback, reset in itertools.product(kinds_of(policy), ("request", "never")):
        yield feedback, reset, replay(log, policy, feedback=feedback, reset=reset, seed=5, keep_path=True, **options)


GOLDEN = np.array([[3, 2], [1, 1], [4, 1], [1, 1], [1, 1], [1, 1]])


def test_hand_computed_blocks_of_six_tokens():
    """Arm a: 0 3 4 5 6 = 4 blocks; arm b: 0 2 3 4 5 6 = 5; per block 4; exact: b then a, 0 2 6 = 2."""
    log = log_of([GOLDEN], draft_len=3)
    assert [int(fixed(log, k).blocks[0]) for k in (0, 1)] == [4, 5]
    assert oracle_block(log).blocks[0] == 4 and oracle_dp(log).blocks[0] == 2
    assert oracle_dp(log).pulls.tolist() == [[1, 1]]
    assert headroom(oracle_dp(log), oracle_fixed(log)) == pytest.approx(1.0)


def test_per_block_oracle_can_lose_to_best_fixed():
    """Position 2 becomes (1, 4): always b is 0 2 6, the per-block oracle still goes 0 3 4 5 6."""
    counts = GOLDEN.copy()
    counts[2] = (1, 4)
    log = log_of([counts], draft_len=3)
    assert oracle_fixed(log).blocks[0] == 2 and oracle_block(log).blocks[0] == 4


@pytest.mark.parametrize("file", ["golden_small.jsonl", "all_tied.jsonl", "loop_inflated.jsonl"])
def test_published_small_cases(file):
    expected = json.loads((CASES / "expected.json").read_text(encoding="utf-8"))[file]
    log = read_log(CASES / file)
    parts = [(log, expected.get("with_loop", expected.get("replay", expected)))]
    if "without_loop" in expected:
        parts.append(
            (log.select(np.array([r != expected["looping_request"] for r in log.requests])), expected["without_loop"])
        )
    for part, numbers in parts:
        found = {a: int(fixed(part, k).blocks.sum()) for k, a in enumerate(part.arms)}
        assert found == numbers["blocks_fixed"]
        assert oracle_request(part).blocks.sum() == numbers["blocks_best_fixed_per_request"]
        assert oracle_block(part).blocks.sum() == numbers["blocks_greedy_oracle"]
        assert oracle_dp(part).blocks.sum() == numbers["blocks_dp_oracle"]
        pooled = {a: fixed(part, k).block_efficiency for k, a in enumerate(part.arms)}
        assert pooled == pytest.approx(numbers["block_efficiency_micro"], abs=1e-6)
        macro = {a: float((fixed(part, k).emitted / fixed(part, k).blocks).mean()) for k, a in enumerate(part.arms)}
        assert macro == pytest.approx(numbers["block_efficiency_macro"], abs=1e-6)


def test_best_fixed_arm_flips_when_the_looping_request_leaves():
    expected = json.loads((CASES / "expected.json").read_text(encoding="utf-8"))["loop_inflated.jsonl"]
    log = read_log(CASES / "loop_inflated.jsonl")
    normal = log.select(np.array([r != expected["looping_request"] for r in log.requests]))
    names = [f"fixed:{expected[k]}" for k in ("best_fixed_with_loop", "best_fixed_without_loop")]
    assert [f"fixed:{one.arms[best_arms(one, 'log')[0]]}" for one in (log, normal)] == names


def test_a_block_anchored_log_is_refused():
    log = read_log(CASES / "anchored_only.jsonl")
    for attempt in (
        lambda: fixed(log, 0),
        lambda: oracle_dp(log),
        lambda: oracle_block(log),
        lambda: replay(log, UCB1()),
    ):
        with pytest.raises(LogError, match="block-anchored"):
            attempt()


@settings(max_examples=25)
@given(small_logs())
def test_every_output_token_is_emitted_exactly_once(log):
    """Blocks tile each output: every block starts where the last one ended, the last ends with the output."""
    for policy in policies(log.n_arms):
        for _, _, found in runs_of(log, policy):
            step = log.emitted[found.path.rows, found.path.arms]
            ends = found.path.rows + step
            assert set(found.path.rows) == set(log.starts[:-1]) | (set(ends) - set(log.starts[1:]))
            assert (found.emitted == np.diff(log.starts)).all() and (found.pulls.sum(axis=1) == found.blocks).all()


@settings(max_examples=25)
@given(small_logs())
def test_no_policy_needs_fewer_blocks_than_the_dp_oracle(log):
    least = oracle_dp(log).blocks
    for policy in policies(log.n_arms):
        for _, _, found in runs_of(log, policy):
            assert (found.blocks >= least).all()
    for oracle in (oracle_fixed, oracle_workload, oracle_request, oracle_block):
        assert (oracle(log).blocks >= least).all()


def shortest(counts):
    """Fewest blocks over all sequences of arms, by trying them all."""
    if not len(counts):
        return 0
    return 1 + min(shortest(counts[y:]) for y in set(counts[0]))


@given(small_logs())
def test_dp_oracle_equals_exhaustive_search(log):
    emitted = log.emitted
    expected = [shortest(emitted[a:b].tolist()) for a, b in itertools.pairwise(log.starts)]
    assert oracle_dp(log).blocks.tolist() == expected


def cheapest(counts, costs):
    if not len(counts):
        return 0.0
    return min(c + cheapest(counts[y:], costs) for y, c in zip(counts[0], costs, strict=True))


@given(small_logs(arms=st.integers(1, 3)), st.integers(0, 3))
def test_adding_an_arm_never_hurts_the_dp_oracle(log, shift):
    extra = np.roll(log.accepted[:, :1], shift, axis=0)
    extra = np.minimum(extra, log.remaining[:, None]).astype(np.int16)
    wider = replace(log, arms=(*log.arms, "z"), accepted=np.hstack([log.accepted, extra]))
    assert (oracle_dp(wider).blocks <= oracle_dp(log).blocks).all()


@given(small_logs())
def test_identical_arms_have_no_headroom(log):
    same = replace(log, accepted=np.repeat(log.accepted[:, :1], log.n_arms, axis=1))
    assert headroom(oracle_dp(same), oracle_fixed(same)) == 0
    assert set(oracle_fixed(same).pulls.argmax(axis=1)) == {0}


@settings(max_examples=15)
@given(small_logs(arms=st.integers(2, 4)), st.integers(0, 2**32 - 1))
def test_bandit_policy_cannot_see_unchosen_arms(log, seed):
    """Alter every count that was not chosen on the way: choices do not move."""
    rng = np.random.default_rng(seed)
    for policy in policies(log.n_arms):
        if "bandit" not in kinds_of(policy):
            continue
        for reset in ("request", "never"):
            found = replay(log, policy, feedback="bandit", reset=reset, seed=5, keep_path=True)
            other = np.minimum(rng.integers(0, log.draft_len + 1, log.accepted.shape), log.remaining[:, None]).astype(
                np.int16
            )
            other[found.path.rows, found.path.arms] = log.accepted[found.path.rows, found.path.arms]
            again = replay(replace(log, accepted=other), policy, feedback="bandit", reset=reset, seed=5, keep_path=True)
            assert np.array_equal(again.path.rows, found.path.rows) and np.array_equal(
                again.path.arms, found.path.arms
            ), policy


@settings(max_examples=25)
@given(st.integers(0, 2**32 - 1), st.integers(1, 60))
def test_delayed_feedback_reveals_nothing_beyond_emitted_tokens(seed, cut):
    """Choices up to position ``cut`` of each request stay when every count is altered that the text up to there
    does not reveal: counts of unvisited rows, and counts whose first mismatch lies beyond ``cut``."""
    rng = np.random.default_rng(seed)
    log = wide_log(seed)
    row, limit = (
        np.arange(log.n_positions),
        np.repeat(np.minimum(log.starts[:-1] + cut, log.starts[1:]), np.diff(log.starts)),
    )
    reach = row[:, None] + np.minimum(log.emitted, log.draft_len)
    for policy in policies(log.n_arms):
        if "delayed" not in kinds_of(policy):
            continue
        found = replay(log, policy, feedback="delayed", seed=5, keep_path=True)
        visited = np.isin(row, found.path.rows) & (row < limit)
        chosen = np.zeros(log.accepted.shape, dtype=bool)
        chosen[found.path.rows, found.path.arms] = True
        least = np.where(visited, np.clip(limit - row + 1, 1, log.draft_len), 1)[:, None]  # stays beyond the cut
        other = np.minimum(rng.integers(least, log.draft_len + 2, size=reach.shape) - 1, log.remaining[:, None])
        keep = visited[:, None] & ((reach <= limit[:, None]) | chosen) | (least > log.remaining[:, None])
        altered = np.where(keep, log.accepted, other).astype(np.int16)
        again = replay(replace(log, accepted=altered), policy, feedback="delayed", seed=5, keep_path=True)
        for one, two in zip(_up_to(found, limit), _up_to(again, limit), strict=True):
            assert np.array_equal(one, two), policy


def _up_to(found, limit):
    early = found.path.rows <= limit[found.path.rows]
    return found.path.rows[early], found.path.arms[early]


@settings(max_examples=10)
@given(small_logs())
def test_replay_leaves_the_log_unchanged(log):
    before = copy.deepcopy(log)
    for policy in policies(log.n_arms):
        for _ in runs_of(log, policy):
            pass
    oracle_dp(log)
    for name in ("accepted", "proposed", "remaining", "position", "starts", "workload"):
        assert np.array_equal(getattr(log, name), getattr(before, name))
    assert np.array_equal(log.context["match_length"], before.context["match_length"])


@settings(max_examples=15)
@given(small_logs())
def test_same_seed_same_choices_alone_or_among_other_seeds(log):
    for policy in policies(log.n_arms):
        for feedback, reset, found in runs_of(log, policy):
            together = replay_seeds(log, policy, [1, 5, 9], feedback=feedback, reset=reset, keep_path=True)[1]
            assert np.array_equal(found.path.arms, together.path.arms) and np.array_equal(
                found.path.rows, together.path.rows
            )


@settings(max_examples=15)
@given(small_logs(), st.randoms())
def test_request_order_does_not_matter_when_state_resets(log, random):
    order = list(range(log.n_requests))
    random.shuffle(order)
    for policy in policies(log.n_arms):
        for feedback in kinds_of(policy):
            one = replay(log, policy, feedback=feedback, seed=3)
            two = replay(log.select(np.array(order)), policy, feedback=feedback, seed=3)
            assert np.array_equal(one.pulls[order], two.pulls), policy


@settings(max_examples=15)
@given(small_logs())
def test_policies_seeds_and_kinds_of_feedback_in_the_same_steps_equal_separate_runs(log):
    runs = [Run(p, seed, kind) for p in policies(log.n_arms) for seed in (1, 5) for kind in kinds_of(p)]
    for reset in ("request", "never"):
        together = replay_runs(log, runs, reset=reset, keep_path=True)
        for run, found in zip(runs, together, strict=True):
            alone = replay(log, run.policy, feedback=run.feedback, reset=reset, seed=run.seed, keep_path=True)
            assert np.array_equal(found.path.arms, alone.path.arms) and found.feedback == run.feedback, run
            assert np.array_equal(found.path.rows, alone.path.rows)


def wide_log(seed=0, n=8, n_arms=3, draft_len=6):
    rng = np.random.default_rng(seed)
    lengths = rng.integers(20, 90, n)
    counts = [
        np.minimum(rng.geometric(rng.uniform(0.2, 0.6, n_arms), size=(t, n_arms)), draft_len + 1) for t in lengths
    ]
    return log_of(
        counts, draft_len=draft_len, match=[rng.integers(0, 7, t) for t in lengths], workload=[i % 2 for i in range(n)]
    )


def test_two_seeds_draw_different_arms_and_the_seed_is_required():
    log = wide_log()
    one, two = replay_seeds(log, Random(), [1, 2])
    assert not np.array_equal(one.pulls, two.pulls)
    with pytest.raises(SpecselError, match="give a seed"):
        replay(log, Random())


def test_random_play_agrees_with_its_exact_expectation():
    """Expected blocks by recursion over positions, and equal shares, against 400 seeds, within 4 standard errors."""
    log = wide_log()
    emitted, expected = log.emitted, []
    for a, b in itertools.pairwise(log.starts):
        value = np.zeros(b - a + 1)
        for p in range(b - a - 1, -1, -1):
            value[p] = 1 + value[p + emitted[a + p]].mean()
        expected.append(value[0])
    runs = replay_seeds(log, Random(), range(400))
    blocks = np.array([r.blocks for r in runs])
    error = blocks.std(axis=0, ddof=1) / 20
    assert (np.abs(blocks.mean(axis=0) - expected) < 4 * error).all()
    pulls = sum(r.pulls.sum(axis=0) for r in runs)
    assert pulls / pulls.sum() == pytest.approx([1 / 3] * 3, abs=4 * (2 / 9 / pulls.sum()) ** 0.5)


def scalar_ucb1(counts, draft_len):
    """UCB1 on one request, written out."""
    n_arms = counts.shape[1]
    pulls, sums, p, blocks = [0] * n_arms, [0] * n_arms, 0, 0
    while p < len(counts):
        t = sum(pulls)
        index = [
            math.inf if not pulls[i] else sums[i] / pulls[i] / draft_len + math.sqrt(2 * math.log(t) / pulls[i])
            for i in range(n_arms)
        ]
        arm = index.index(max(index))
        pulls[arm] += 1
        sums[arm] += counts[p, arm] - 1
        p += counts[p, arm]
        blocks += 1
    return blocks


def scalar_leader(requests, draft_len, *, discount, delayed, persistent):
    """Follow-the-leader with a queue of rounds, written out."""
    gain, total = None, []
    for counts in requests:
        if gain is None or not persistent:
            gain = [0.0] * counts.shape[1]
        p, blocks, waiting = 0, 0, []
        while p < len(counts):
            arm = gain.index(max(gain))
            waiting.append((p + min(max(counts[p]), draft_len), counts[p]))
            p += counts[p, arm]
            blocks += 1
            for _, y in [w for w in waiting if not delayed or w[0] <= p]:
                gain = [discount * g + v for g, v in zip(gain, y, strict=True)]
            waiting = [w for w in waiting if delayed and w[0] > p]
        total.append(blocks)
    return total


def test_replay_equals_rules_written_out_one_request_at_a_time():
    log = wide_log(4, n=12)
    requests = [log.emitted[a:b] for a, b in itertools.pairwise(log.starts)]
    assert replay(log, UCB1()).blocks.tolist() == [scalar_ucb1(c, log.draft_len) for c in requests]
    for discount, feedback, reset in itertools.product((1.0, 0.5, 0.0), ("full", "delayed"), ("request", "never")):
        expected = scalar_leader(
            requests, log.draft_len, discount=discount, delayed=feedback == "delayed", persistent=reset == "never"
        )
        found = replay(log, FollowTheLeader(discount=discount), feedback=feedback, reset=reset)
        assert found.blocks.tolist() == expected, (discount, feedback, reset)


def test_counts_are_released_one_by_one_to_learners_on_arms():
    """One request, L = 4, arms a and b emit (1, 4) at position 0, a always drafts: blocks start at 0 1 2 3 4.

    a's count of block 0 is known at once, b's only once 0 + min(4, 4) tokens are out: with the end of the fourth block.
    """
    seen = []

    class Watcher(GaussianThompson):
        __slots__ = ()

        def draws(self, n_arms):
            return 0

        def choose(self, state, view, uniforms):
            return np.zeros(len(view.block), dtype=int)

        def update(self, state, feedback):
            seen.append((feedback.view.block.tolist(), feedback.seen.tolist(), feedback.emitted.tolist()))

    log = log_of([[[1, 4], [1, 1], [1, 1], [1, 1], [1, 1]]], draft_len=4)
    replay(log, Watcher(), feedback="delayed")
    assert seen[0] == ([0], [[True, False]], [[1, 0]])
    assert seen[1:4] == [
        ([1], [[True, True]], [[1, 1]]),
        ([2], [[True, True]], [[1, 1]]),
        ([0], [[False, True]], [[0, 4]]),
    ]


def test_a_policy_gets_the_features_that_it_reads_and_no_others():
    class Watcher(Gate):
        __slots__ = ()

        def choose(self, state, view, uniforms):
            assert set(view.features) == {"match_length"}
            return np.zeros(len(view.block), dtype=int)

    replay(wide_log(), Watcher("match_length", 1, 0, 0))


def test_blocks_are_counted_within_the_request_also_when_state_is_kept():
    """Requests of 2 and 3 tokens, one token per block."""
    seen = []

    class Watcher(Fixed):
        __slots__ = ()

        def choose(self, state, view, uniforms):
            seen.append(view.block.tolist())
            return np.zeros(len(view.block), dtype=int)

    log = log_of([[[1, 1]] * 2, [[1, 1]] * 3], draft_len=1)
    replay(log, Watcher(0), reset="never")
    assert seen == [[0], [1], [0], [1], [2]]
    seen.clear()
    replay(log, Watcher(0))
    assert seen == [[0, 0], [1, 1], [2]]


def test_random_numbers_of_a_request_do_not_repeat_and_differ_between_requests():
    log = log_of([[[1, 1]] * 100] * 3, draft_len=1)
    draws = Draws(log, GaussianThompson(), [1])
    request, seed = np.arange(3), np.zeros(3, dtype=int)
    drawn = np.array([draws.next(seed, request, np.full(3, b)) for b in range(100)])
    assert len(np.unique(drawn)) == drawn.size == 600 and 0 <= drawn.min() and drawn.max() < 1


def test_impossible_requests_are_refused_with_the_next_step():
    log = wide_log()
    for policy, options, message in (
        (Hedge(), {"feedback": "bandit"}, "use 'full' or 'delayed'"),
        (UCB1(), {"feedback": "later"}, "expected bandit, full or delayed"),
        (UCB1(), {"reset": "daily"}, "request or never"),
        (Gate("target_entropy", 1, 0, 1), {}, "no context 'target_entropy'"),
    ):
        with pytest.raises(SpecselError, match=message):
            replay(log, policy, seed=1, **options)


def test_best_arms_per_scope():
    """Requests of workloads 0, 1, 1; fewest blocks: a in the first, b in the others."""
    good, bad = [[4, 1]] * 8, [[1, 2]] * 8
    log = log_of([good, bad, bad], draft_len=3, workload=[0, 1, 1])
    assert best_arms(log, "request").tolist() == [0, 1, 1] == best_arms(log, "workload").tolist()
    assert [int(fixed(log, k).blocks.sum()) for k in (0, 1)] == [18, 16] and set(best_arms(log, "log")) == {1}


def test_totals_by_workload_add_up():
    log = wide_log()
    found = replay(log, UCB1())
    parts = found.by_workload()
    assert list(parts) == ["w0", "w1"] and sum(p["blocks"] for p in parts.values()) == found.blocks.sum()
    assert sum(sum(p["pulls"].values()) for p in parts.values()) == found.blocks.sum()
    assert json.loads(json.dumps(parts)) == parts


# ---- plans of several arms


@settings(max_examples=40, deadline=None)
@given(small_logs(), st.integers(0, 2**32 - 1))
def test_a_plan_keeps_the_longest_draft_of_the_arms_that_it_runs(log, seed):
    """Against a loop over blocks; where no arm runs a block emits one token."""
    plan = Plan("p", np.random.default_rng(seed).random((log.n_positions, log.n_arms)) < 0.5)
    found = follow(log, plan, keep_path=True)
    for r in range(log.n_requests):
        row, blocks, pulls = log.starts[r], 0, np.zeros(log.n_arms)
        while row < log.starts[r + 1]:
            ran = plan.arms[row]
            pulls, blocks = pulls + ran, blocks + 1
            row += log.emitted[row][ran].max(initial=1)
        assert found.blocks[r] == blocks and (found.pulls[r] == pulls).all()
    best = np.where(found.path.ran, log.accepted[found.path.rows], -1)
    assert (found.path.arms == np.where(found.path.ran.any(axis=1), best.argmax(axis=1), -1)).all()


def test_a_policy_and_its_plan_have_the_same_blocks():
    log = wide_log()
    for k in range(log.n_arms):
        assert np.array_equal(replay(log, Fixed(k)).totals, fixed(log, k).totals)
        assert np.array_equal(replay(log, Plan.one("k", log, k)).totals, fixed(log, k).totals)


def composite_log():
    """Arms a (neural), b (lookup) and c, which hands on b's draft at the first position and a's at the second."""
    log = log_of([[[1, 3, 3], [2, 1, 2], [1, 1, 1]]], draft_len=2)
    confident = np.array([[0.9, np.nan, np.nan]] * 3)
    source = np.array([[-1, -1, 1], [-1, -1, 0], [-1, -1, 0]], dtype=np.int8)
    return replace(log, source=source, stats={"conf_first": confident})


def test_a_draft_that_a_composite_arm_hands_on_is_not_made_twice():
    log = composite_log()
    for arms, passes in (([0, 0, 1], 0), ([1, 0, 1], 1), ([0, 1, 0], 0), ([1, 1, 1], 1)):
        plan = Plan("p", np.array([arms] * 3, dtype=bool))
        assert follow(log, plan).neural_passes.tolist() == [passes], arms
    assert fixed(log, 0).neural_passes.tolist() == [2] and fixed(log, 2).neural_passes.tolist() == [0]
    table = per_request(log, {"c": fixed(log, 2)})
    assert table.tokens.tolist() == [3] and table["passes", "c"].tolist() == [0]


class UnitCosts:
    """A draft of a costs 10 s, of b 1 s; verifying a row costs 0.1 s."""

    arms = ("a", "b")

    def draft_s(self, arm, context):
        return {"a": 10.0, "b": 1.0}[arm]

    def block_s(self, arms, context, *, ran, rows, stale):
        return ran[:, :2] @ [10.0, 1.0] + 0.1 * rows


def test_seconds_are_those_of_the_drafts_that_were_made():
    """c tries b first, always; at the first position it keeps b's draft of two tokens: one block, 1 + 0.3 s."""
    log = composite_log()
    assert fixed(log, 2, costs=UnitCosts()).seconds == pytest.approx([1.3])
    both = follow(log, Plan("p", np.array([[1, 0, 1]] * 3, dtype=bool)), costs=UnitCosts())
    assert both.seconds == pytest.approx([11.0 + 0.1 * (1 + 2 + 2)])  # a's rejected drafts are rows, too
