"""The buffer: what an experience holds, against brute force; when things are sampled; what is asked how often."""
import copy
import itertools
import math
import statistics
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import torch
from torch.testing import assert_close

from rookworld_nb import buffer as buffer_module
from rookworld_nb.buffer import (ROW_COLUMNS, BufferConfig, Collector, CollectorConfig, RolloutBuffer, ask_reference, buffer_state, collector_state,
                                 counting_policy, restore_buffer, restore_collector)
from rookworld_nb.credit import PartCredit
from rookworld_nb.grpo import EMATracker, compute_advantages
from rookworld_nb.kl import SettingError
from rookworld_nb.model import GPT
from rookworld_nb.positions import PromptMix, Sample
from rookworld_nb.rewards import BadScoresError, RewardConfig, Scores
from rookworld_nb.sampling import completion_logprobs
from toy import G, TASK, collector


@pytest.fixture
def model(base):
    return copy.deepcopy(base)


def logprobs(model, part):
    r = part.rollouts
    with torch.no_grad():
        return completion_logprobs(model, r.prompt_ids, r.prompt_mask, r.completion_ids, r.completion_mask, r.group_size, r.temperature)[0]


class Recorder:
    "A scorer that remembers its calls; its normalised rewards differ from the ones in the table."
    def __init__(self):
        self.calls = []

    def __call__(self, prompts, completions, targets=None):
        self.calls.append((list(prompts), list(completions), list(targets)))
        scores = TASK(prompts, completions)
        return Scores(3*scores.rewards + torch.arange(len(prompts))/100, scores.components)


class ReadingReference(GPT):
    "A reference that counts the prompts it reads."
    read = 0

    def prefill(self, ids, attention_mask=None):
        self.read += len(ids)
        return super().prefill(ids, attention_mask)


# what an experience holds

def test_parts_belong_together(model):
    experience = next(collector(model, env=.25))
    assert [(part.task, len(part.samples)) for part in experience.parts] == [('P', 3), ('A', 1)]
    for part in experience.parts:
        rows = len(part.samples)*G
        assert all(sample.task == part.task for sample in part.samples)
        assert all(len(x) == rows for x in (part.rewards, part.advantages, part.clipped, part.components, part.rollouts.texts))
        assert part.ref_logprobs.shape == part.rollouts.completion_mask.shape
        table = TASK([s.prompt for s in part.samples for _ in range(G)], part.rollouts.texts)
        assert_close(part.rewards, table.rewards)
    assert experience.max_completion_length == 3


@pytest.mark.parametrize(('env', 'tasks', 'longest'), [(0., ['P'], 2), (1., ['A'], 3)])
def test_one_task_alone_is_one_part(model, env, tasks, longest):
    experience = next(collector(model, env=env))
    assert [part.task for part in experience.parts] == tasks
    assert experience.max_completion_length == 3    # of either task, so that it is the same for every batch
    assert max(part.rollouts.completion_ids.shape[1] for part in experience.parts) <= longest


@pytest.mark.parametrize('temperature', [.7, 1.3])
def test_logprobs_are_those_of_the_sampler_and_of_the_reference(model, temperature):
    other = counting_policy(steps=5, seed=7)
    for part in next(collector(model, other, temperature=temperature)).parts:
        mask = part.rollouts.completion_mask
        assert part.rollouts.temperature == temperature
        assert_close(part.rollouts.logprobs, logprobs(model, part), atol=1e-5, rtol=0)
        assert_close(part.ref_logprobs, logprobs(other, part), atol=1e-6, rtol=0)
        assert (part.ref_logprobs - part.rollouts.logprobs)[mask].abs().max() > .05
        assert not part.ref_logprobs.requires_grad


def test_without_a_reference_there_are_no_reference_logprobs(model):
    assert all(part.ref_logprobs is None for part in next(collector(model, None)).parts)


def test_clipped_means_no_end_token(model):
    short = next(collector(model, env=0., prompts=10, max_new_tokens=1)).parts[0]
    assert short.clipped.tolist() == [text != '' for text in short.rollouts.texts]
    long = next(collector(model, env=0., prompts=10, max_new_tokens=4)).parts[0]
    ended = [(0 in ids) for ids in long.rollouts.completion_ids.masked_fill(~long.rollouts.completion_mask, 5).tolist()]
    assert long.clipped.tolist() == [not end for end in ended] and not all(long.clipped)


def test_table_has_a_row_per_completion(model):
    experience = next(collector(model))
    table = experience.table
    assert len(table) == 4*G and list(table.index) == list(range(4*G))
    for (i, row), (part, j) in zip(table.iterrows(), [(p, j) for p in experience.parts for j in range(len(p.rewards))], strict=True):
        assert (row.prompt, row.completion) == (part.samples[j//G].prompt, part.rollouts.texts[j])
        assert row.task == part.task and row.tokens == part.lengths[j] and row.clipped == part.clipped[j]
        assert math.isclose(row.advantage, part.advantages[j], abs_tol=1e-6) and math.isclose(row.reward, part.rewards[j], abs_tol=1e-6)


# advantages

@pytest.mark.parametrize('baseline', ['group_mean', 'leave_one_out', 'adaptive'])
@pytest.mark.parametrize('scale', ['group', 'batch', 'none'])
def test_advantages_are_those_of_the_whole_batch(model, baseline, scale):
    experience = next(collector(model, env=.5, baseline=baseline, scale_rewards=scale))
    rewards, advantages = (torch.cat([getattr(part, name) for part in experience.parts]) for name in ('rewards', 'advantages'))
    assert_close(advantages, compute_advantages(rewards, G, baseline, scale))


def test_the_running_baseline_remembers_each_task(model):
    source, tracker = collector(model, baseline='ema', scale_rewards='none'), EMATracker()
    for experience in itertools.islice(source, 3):
        rewards, advantages = (torch.cat([getattr(part, name) for part in experience.parts]) for name in ('rewards', 'advantages'))
        tasks = [part.task for part in experience.parts for _ in part.samples]
        assert_close(advantages, compute_advantages(rewards, G, 'ema', 'none', tracker, tasks))
    assert set(source.tracker.averages) == {'P', 'A'}


# metrics

def test_metrics_against_brute_force(model):
    source = collector(model, env=.5, prompts=6)
    next(source)
    experience = next(source)
    metrics = experience.metrics()
    rows = [(part.task, float(r), int(n), bool(c)) for part in experience.parts
            for r, n, c in zip(part.rewards, part.rollouts.completion_mask.sum(1), part.clipped)]
    rewards, lengths = [row[1] for row in rows], [row[2] for row in rows]
    groups = [rewards[i:i+G] for i in range(0, len(rewards), G)]

    def quantile(values, q):
        ordered, at = sorted(values), q*(len(values) - 1)
        low, high = ordered[math.floor(at)], ordered[math.ceil(at)]
        return low + (at - math.floor(at))*(high - low)

    expected = {
        'reward': statistics.fmean(rewards), 'reward_std': statistics.fmean(map(statistics.stdev, groups)),
        'frac_reward_zero_std': sum(len(set(group)) == 1 for group in groups)/len(groups),
        'task_P/reward': statistics.fmean(r for t, r, *_ in rows if t == 'P'),
        'task_A/reward': statistics.fmean(r for t, r, *_ in rows if t == 'A'), 'task_P/fraction': .5,
        'completions/mean_length': statistics.fmean(lengths), 'completions/min_length': min(lengths),
        'completions/max_length': max(lengths), 'completions/unjudged': 0., 'completions/clipped_ratio': statistics.fmean(c for *_, c in rows),
        'num_tokens': source.num_tokens, 'kl_penalty': 0., 'perf/gen_tok_s': sum(lengths)/experience.gen_seconds}
    for prefix, tasks in (('', 'PA'), ('task_P/', 'P'), ('task_A/', 'A')):
        some = [r for t, r, *_ in rows if t in tasks]
        expected |= {f'{prefix}reward_{name}': quantile(some, q) for name, q in (('min', 0), ('25pct', .25), ('75pct', .75), ('max', 1))}
    for part in experience.parts:
        for name in ('format', 'right'):
            values = [TASK.score(part.samples[i//G].prompt, text)[name] for i, text in enumerate(part.rollouts.texts)]
            expected[f'rewards/{part.task}_{name}/mean'] = statistics.fmean(values)
            expected[f'rewards/{part.task}_{name}/std'] = statistics.pstdev(values)
    assert set(metrics) == set(expected)
    for name, value in expected.items():
        assert math.isclose(metrics[name], value, rel_tol=1e-5, abs_tol=1e-6), name


def test_absent_tasks_and_components_have_no_metrics(model):
    def scorer(prompts, completions, targets=None):
        table = TASK(prompts, completions).components
        table['only_P'] = table['right'].where(table['task'] == 'P')
        return Scores(torch.tensor(table['reward'].to_numpy(), dtype=torch.float32), table)
    both, alone = next(collector(model, scorer=scorer)).metrics(), next(collector(model, env=0., scorer=scorer)).metrics()
    assert 'rewards/P_only_P/mean' in both and 'rewards/A_only_P/mean' not in both
    assert not [name for name in alone if 'A_' in name or 'task_A' in name] and alone['task_P/fraction'] == 1
    assert all(math.isfinite(value) for value in (*both.values(), *alone.values()))


def test_metrics_are_a_copy(model):
    experience = next(collector(model))
    experience.metrics()['reward'] = 99.
    assert experience.metrics()['reward'] < 2


def test_tokens_are_counted_over_the_run_prompts_included(model):
    source, total = collector(model), 0
    for experience in itertools.islice(source, 3):
        for part in experience.parts:
            total += sum(len(TASK.tokenizer.encode(s.prompt).ids) for s in part.samples)*G + int(part.rollouts.completion_mask.sum())
        assert experience.num_tokens == experience.metrics()['num_tokens'] == total


# who is asked, and when

def test_the_scorer_is_asked_once_with_everything_and_its_rewards_are_used(model):
    scorer = Recorder()
    experience = next(collector(model, scorer=scorer))
    (prompts, completions, targets), = scorer.calls
    assert prompts == experience.table['prompt'].tolist() and completions == experience.table['completion'].tolist()
    assert targets == [s.completion for part in experience.parts for s in part.samples for _ in range(G)]
    rewards = torch.cat([part.rewards for part in experience.parts])
    assert_close(rewards, 3*torch.tensor(experience.table['reward'].to_numpy(), dtype=torch.float32) + torch.arange(4*G)/100)
    assert_close(torch.cat([part.advantages for part in experience.parts]), compute_advantages(rewards, G))
    assert math.isclose(experience.metrics()['reward'], experience.table['reward'].mean(), rel_tol=1e-6)


def test_a_prompt_without_target_is_scored_without(model):
    scorer = Recorder()
    config = CollectorConfig(group_size=G, max_new_tokens=2)
    next(Collector(model, None, TASK.tokenizer, [[Sample('P: 1', ''), Sample('P: 2', '3')]], scorer, config))
    assert scorer.calls[0][2] == [None]*G + ['3']*G


# a task that is neither P: nor A:, and scorers of one's own

SUMS = [Sample(f'{a} {b}', '', task='sum') for a, b in ((1, 2), (3, 4), (5, 2))]


def own_collector(model, scorer, prompts=SUMS, **options):
    options = {'group_size': G, 'temperature': 1., 'max_new_tokens': 2, 'max_new_tokens_env': 1} | options
    return Collector(model, copy.deepcopy(model), TASK.tokenizer, itertools.repeat(prompts), scorer, CollectorConfig(**options))


def ones(prompts, completions, targets):
    return [float('1' in text) for text in completions]


def test_another_task_is_collected_replayed_and_restored(model):
    """Beside P: and A: prompts, with the limit of P:; nothing of it is lost on the way through a checkpoint."""
    source = own_collector(model, ones, [TASK.samples[12], *SUMS, TASK.samples[3]])
    buffer = RolloutBuffer(source, BufferConfig(replays=2))
    whole = next(buffer)
    assert [part.task for part in whole.parts] == ['P', 'A', 'sum'] and [len(part.samples) for part in whole.parts] == [1, 1, 3]
    assert whole.parts[2].lengths.max() == 2 and whole.parts[1].lengths.max() == 1
    assert set(whole.table['task']) == {'P', 'A', 'sum'} and 0 < whole.metrics()['task_sum/reward'] < 1
    again = RolloutBuffer(own_collector(model, ones), BufferConfig(replays=2))
    restore_buffer(again, copy.deepcopy(buffer_state(buffer)), torch.device('cpu'))
    assert [part.samples for part in next(again).parts] == [part.samples for part in next(buffer).parts]


def test_plain_rewards_are_scores(model):
    """Numbers, truth values, a tensor: what a function of one's own returns; raw and reward are the same."""
    by_hand = next(own_collector(model, ones))
    for kind in (lambda *asked: [int(one) for one in ones(*asked)], lambda *asked: torch.tensor(ones(*asked)) > 0, lambda *asked: np.array(ones(*asked))):
        experience = next(own_collector(model, kind))
        assert experience.metrics() | {'perf/gen_tok_s': 0} == by_hand.metrics() | {'perf/gen_tok_s': 0}
    table = by_hand.table
    assert (table['raw'] == table['reward']).all() and set(table['reward']) == {0., 1.} and set(table['task']) == {'sum'}


@pytest.mark.parametrize('given', [None, [None]*12, ['a']*12, 'a'*12, {n: 1. for n in range(12)}, 3.])
def test_what_is_no_row_of_numbers_is_said(model, given):
    with pytest.raises(BadScoresError, match='a number for each of 12 answers is needed; it gave .'): next(own_collector(model, lambda *asked: given))


@pytest.mark.parametrize('count', [0, 3, 11, 13])
def test_a_reward_for_each_completion(model, count):
    with pytest.raises(BadScoresError, match='scorer .*lambda.*: a number for each of 12 answers is needed; it gave .'):
        next(own_collector(model, lambda *asked: [0.]*count))
    with pytest.raises(BadScoresError, match=f'the scorer gave {count} rewards for 12 answers'):
        next(own_collector(model, lambda *asked: Scores(torch.zeros(count), pd.DataFrame({'task': ['sum']*count, 'raw': 0., 'reward': 0.}))))


@pytest.mark.parametrize('lost', [math.nan, math.inf, 1e39])
def test_a_reward_that_is_no_number_is_refused_and_not_trained_on(model, lost):
    with pytest.raises(BadScoresError, match='the reward of 2 of 12 answers is not finite .* for an answer to sum'):
        next(own_collector(model, lambda *asked: [lost, lost] + [.5]*10))
    table = pd.DataFrame({'task': 'P', 'raw': [.5]*3, 'reward': [.5]*3})
    with pytest.raises(BadScoresError, match='the reward of 1 of 3 answers'): Scores(torch.tensor([.5, lost, .5]), table)


def test_columns_of_whole_numbers_and_of_words_do_no_harm(model):
    def scorer(prompts, completions, targets):
        table = pd.DataFrame({'task': 'sum', 'raw': [1, 0]*6, 'reward': [1, 0]*6, 'right': [True, False]*6, 'note': 'a word'})
        return Scores(torch.tensor([1., 0.]*6), table)
    metrics = next(own_collector(model, scorer)).metrics()
    assert metrics['reward'] == metrics['rewards/sum_right/mean'] == .5 and not [name for name in metrics if 'note' in name]
    assert metrics['reward_25pct'] == 0 and metrics['reward_75pct'] == 1


def test_the_reference_reads_every_prompt_once_however_often_it_is_replayed(model):
    reference = ReadingReference(model.cfg)
    seen = list(itertools.islice(RolloutBuffer(collector(model, reference), BufferConfig(replays=3)), 6))
    assert reference.read == 2*4 and [minibatch.number for minibatch in seen] == [1]*3 + [2]*3


def test_collecting_is_lazy(model):
    asked = []

    def prompts():
        for number in itertools.count():
            asked.append(number)
            yield TASK.samples[:2]

    source = Collector(model, None, TASK.tokenizer, prompts(), TASK, CollectorConfig(group_size=G, max_new_tokens=2))
    stream = RolloutBuffer(source, BufferConfig(replays=2))
    assert asked == []
    for expected in ([0], [0], [0, 1], [0, 1], [0, 1, 2]):
        next(stream)
        assert asked == expected


def test_each_collection_uses_the_weights_of_its_moment(model):
    source = collector(model)
    next(source)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(.05*torch.randn(p.shape, generator=torch.Generator().manual_seed(p.numel())))
    for part in next(source).parts:
        assert_close(part.rollouts.logprobs, logprobs(model, part), atol=1e-5, rtol=0)


def test_the_collection_ends_with_the_prompts(model):
    source = Collector(model, None, TASK.tokenizer, [TASK.samples[:1]]*2, TASK, CollectorConfig(group_size=G, max_new_tokens=2))
    assert len(list(source)) == 2


def test_the_seed_decides_and_nothing_else(model):
    def texts(seed):
        return [e.table['completion'].tolist() for e in itertools.islice(collector(model, seed=seed), 2)]
    torch.manual_seed(1)
    first = texts(0)
    state = torch.get_rng_state()
    assert texts(0) == first and torch.equal(torch.get_rng_state(), state)
    assert texts(1) != first


# the buffer

def buffer(model, prompts=8, env=.25, ref_model='copy', scorer=TASK, options={}, **rules):
    return RolloutBuffer(collector(model, ref_model, env, prompts, scorer, **options), BufferConfig(**rules))


def keys(minibatch):
    "The groups of a minibatch, by what cannot be mistaken: prompt and the sampler's log-probabilities."
    return [(sample.prompt, tuple(part.rollouts.logprobs[i*G:(i+1)*G].sum(1).tolist()))
            for part in minibatch.parts for i, sample in enumerate(part.samples)]


@pytest.mark.parametrize('replays', [1, 2, 5])
def test_without_other_rules_a_collection_is_dealt_whole_and_again(model, replays):
    dealt = list(itertools.islice(buffer(model, replays=replays), 3*replays))
    assert [minibatch.number for minibatch in dealt] == [1 + i//replays for i in range(3*replays)]
    for minibatch in dealt:
        first = next(m for m in dealt if m.number == minibatch.number)
        assert all(a is b for a, b in zip(minibatch.parts, first.parts, strict=True))


@pytest.mark.parametrize(('replays', 'capacity', 'size'), [(2, 1, 4), (2, 1, 3), (3, 2, 4), (1, 3, 8), (4, 3, 5), (2, 2, 16)])
def test_every_group_is_used_as_often_as_asked_and_never_twice_at_once(model, replays, capacity, size):
    source = buffer(model, prompts=8, replays=replays, capacity=capacity, minibatch_positions=size)
    uses, stored = {}, []
    for minibatch in itertools.islice(source, 40):
        dealt = keys(minibatch)
        assert len(set(dealt)) == len(dealt) <= size
        for key in dealt:
            uses[key] = uses.get(key, 0) + 1
        stored.append(minibatch.metrics()['rollout_buffer_size'])
    assert max(uses.values()) == replays and sum(count < replays for count in uses.values()) <= capacity*8
    assert max(stored) <= capacity*8 and len(source.experiences) <= 2*capacity


def test_minibatches_are_what_the_collector_made(model):
    source = buffer(model, prompts=8, capacity=2, minibatch_positions=3, options={'keep_ref_hidden': True})
    whole = {}
    for minibatch in itertools.islice(source, 12):
        for number, experience in source.experiences.items():
            whole[number] = experience
        rows = {(row.prompt, row.completion, row.advantage, row.reward) for experience in whole.values() for row in experience.table.itertuples()}
        for part in minibatch.parts:
            table = replace(minibatch, parts=(part,), measured=None).table
            assert {(row.prompt, row.completion, row.advantage, row.reward) for row in table.itertuples()} <= rows
            assert_close(part.rollouts.logprobs, logprobs(model, part), atol=1e-5, rtol=0)
            assert_close(part.ref_logprobs, part.rollouts.logprobs, atol=1e-5, rtol=0)
            assert part.ref_hidden.shape[:2] == part.loss_mask.shape and len(part.components) == len(part.rewards) == len(part.clipped)


def test_the_order_is_shuffled_by_the_seed(model):
    def order(seed):
        return [keys(minibatch) for minibatch in itertools.islice(buffer(model, minibatch_positions=3, seed=seed), 5)]
    assert order(0) == order(0) != order(1)


@pytest.mark.parametrize('share', [0., .25, .6, 1.])
@pytest.mark.parametrize(('capacity', 'size'), [(1, 4), (3, 4), (4, 2)])
def test_collecting_starts_when_too_little_is_fresh_and_there_is_room(model, share, capacity, size):
    source, numbers = buffer(model, prompts=4, env=0., replays=3, capacity=capacity, minibatch_positions=size, fresh_share=share), []
    for _ in range(25):
        left = [group for group in source.groups if group.uses < 3]
        fresh, expected = sum(group.uses == 0 for group in left), source.newest.number if source.newest else 0
        stored = len(left)
        while not stored or stored + 4 <= 4*capacity and (fresh < share*stored or stored < size):
            expected, stored, fresh = expected + 1, stored + 4, fresh + 4
        next(source)
        assert source.newest.number == expected
        numbers.append(expected)
    assert share > 0 or all(b - a <= 1 for a, b in zip(numbers, numbers[1:]))


def test_old_groups_go_whatever_their_use(model):
    source = buffer(model, prompts=4, replays=50, max_age=3)
    dealt = list(itertools.islice(source, 9))
    assert [minibatch.number for minibatch in dealt] == [1, 1, 1, 2, 2, 2, 3, 3, 3]
    assert [minibatch.metrics()['rollout_age'] for minibatch in dealt] == [0, 1, 2]*3


def test_fresh_share_and_size_are_measured_before_dealing(model):
    source = buffer(model, prompts=4, replays=2, minibatch_positions=2)
    shown = [(m.metrics()['rollout_buffer_size'], m.metrics()['rollout_fresh_share']) for m in itertools.islice(source, 5)]
    assert shown == [(4, 1.), (4, .5), (4, 0.), (2, 0.), (4, 1.)]


def test_the_reported_rewards_are_those_of_the_newest_collection(model):
    source = buffer(model, prompts=4, capacity=2, minibatch_positions=2)
    for minibatch in itertools.islice(source, 9):
        assert minibatch.metrics()['reward'] == source.newest.metrics()['reward']
        assert minibatch.number == source.newest.number


@pytest.mark.parametrize('rules', [dict(replays=2), dict(replays=2, minibatch_positions=2), dict(capacity=2, replays=2, minibatch_positions=1),
                                   dict(capacity=2, replays=2, minibatch_positions=1, prompts=2)])
def test_a_minibatch_is_fresh_where_no_update_lies_between_it_and_its_sampling(model, rules):
    source, seen = buffer(model, **{'prompts': 4} | rules), []
    for minibatch in itertools.islice(source, 24):
        age = minibatch.metrics()['rollout_age']    # the groups of each of these minibatches are of one age
        assert minibatch.fresh == (age == 0)
        seen.append(minibatch.fresh)
    assert 0 < sum(seen) < len(seen) and seen[0]


@pytest.mark.parametrize('size', [2, 4, 6])
def test_what_was_just_sampled_is_dealt_first(model, size):
    source, mixed = buffer(model, prompts=4, capacity=4, replays=3, minibatch_positions=size), 0
    for before in range(24):
        known = source.newest.number if source.newest else 0
        used = {(group.experience, group.part, group.prompt): group.uses for group in source.groups}
        minibatch, new = next(source), source.newest.number - known
        dealt = [group.experience for group in source.groups
                 if group.uses > used.get((group.experience, group.part, group.prompt), 0)]
        assert minibatch.fresh == bool(new)
        if new: assert sum(number > known for number in dealt) == min(size, 4*new)
        mixed += len({*dealt}) > 1
    assert bool(mixed) == (size > 4)    # a smaller minibatch finds enough of one collection


def test_a_late_group_joins_the_pass_that_is_going_on(model):
    "No group is dealt a second time before those that were there have had their turn, the latecomers neither."
    source, late = buffer(model, prompts=4, capacity=4, replays=6, minibatch_positions=3, fresh_share=.2), 0
    for _ in range(40):
        known = max((group.due for group in source.groups), default=0)
        minibatch = next(source)
        due = [group.due for group in source.groups]
        assert max(due) - min(due) <= 1
        late += minibatch.fresh and known > 2
    assert late > 2


@pytest.mark.parametrize('batch', [[], TASK.samples[0], 'P: 1', ['P: 1', 'P: 2']])
def test_what_is_no_batch_of_prompts_is_named(model, batch):
    source = collector(model)
    source.prompts = iter([batch])
    with pytest.raises(SettingError, match='a batch must be a list of Samples, not empty, and not '): next(source)


def test_tied_groups_are_left_out_where_asked(model):
    def scorer(prompts, completions, targets=None):
        scores = TASK(prompts, completions)
        tied = torch.tensor([prompt.endswith(('1', '2', '3', '4')) for prompt in prompts])
        return Scores(torch.where(tied, .5, torch.arange(len(prompts))/100), scores.components)
    minibatch = next(buffer(model, prompts=20, env=0., scorer=scorer, drop_tied=True))
    asked = [prompt for prompt, _ in keys(minibatch)]
    assert asked and not [prompt for prompt in asked if prompt.endswith(('1', '2', '3', '4'))]
    assert len(keys(next(buffer(model, prompts=20, env=0., scorer=scorer)))) == 20


def test_a_price_unties_groups_in_every_count(model):
    def scorer(prompts, completions, targets=None):
        table = TASK(prompts, completions).components.assign(reward=.5)
        return Scores(torch.full((len(prompts),), .5), table)
    def first(weight):
        config = CollectorConfig(group_size=G, temperature=1., max_new_tokens=2, max_new_tokens_env=3, scale_rewards='none')
        source = Collector(model, counting_policy(steps=5, seed=7), TASK.tokenizer, PromptMix(TASK.samples, 8, 0.), scorer, config, lambda: weight)
        return next(RolloutBuffer(source, BufferConfig(drop_tied=True)))
    for weight in (0., 1.):
        batch = first(weight)
        silent = [group.eq(0).all().item() for part in batch.parts for group in part.advantages.view(-1, G)]
        assert batch.metrics()['frac_reward_zero_std'] == (1. if weight == 0 else 0.) and all(silent) is (weight == 0)


def test_a_minibatch_larger_than_the_buffer_is_refused(model):
    with pytest.raises(SettingError, match='minibatch_positions=9: must be at most 8, the 4 groups of a collection times the capacity of 2'):
        next(buffer(model, prompts=4, capacity=2, minibatch_positions=9))
    assert len(keys(next(buffer(model, prompts=4, capacity=2, minibatch_positions=8)))) == 8


def test_a_collection_of_ties_alone_is_kept(model):
    def scorer(prompts, completions, targets=None):
        return Scores(torch.zeros(len(prompts)), TASK(prompts, completions).components)
    assert len(keys(next(buffer(model, prompts=5, scorer=scorer, drop_tied=True)))) == 5


def test_the_buffer_ends_with_its_collector(model):
    source = RolloutBuffer(itertools.islice(collector(model), 2), BufferConfig(replays=2, minibatch_positions=3))
    uses = [key for minibatch in source for key in keys(minibatch)]
    assert len(uses) == 2*2*4 and all(uses.count(key) == 2 for key in uses)


def test_a_cleared_buffer_collects_anew(model):
    source = buffer(model, replays=9)
    next(source)
    source.clear()
    assert next(source).number == 2 and len(source.experiences) == 1


def test_a_running_mean_is_not_divided_by_the_spread_of_a_group():
    with pytest.raises(SettingError, match='scale_rewards=group: not with an ema baseline.*batch or none'): CollectorConfig(baseline='ema')


def test_credit_by_part_needs_to_know_how_each_answer_was_judged(model):
    source = collector(model)
    source.credit = PartCredit(RewardConfig(reward_shaping='continuous'), TASK.tokenizer)
    with pytest.raises(SettingError, match='Scores.judged'): next(source)


@pytest.mark.parametrize('stop', [1, 4, 7])
@pytest.mark.parametrize('hidden', [False, True])
def test_a_buffer_put_up_again_deals_the_same(base, stop, hidden, tmp_path):
    def data_side():
        prompts = PromptMix(TASK.samples, 8, .25)
        config = CollectorConfig(group_size=G, temperature=1., max_new_tokens=2, max_new_tokens_env=3, baseline='ema', scale_rewards='batch', keep_ref_hidden=hidden)
        source = Collector(base, counting_policy(steps=5, seed=3), TASK.tokenizer, prompts, TASK, config)
        return prompts, source, RolloutBuffer(source, BufferConfig(replays=3, capacity=2, minibatch_positions=5))

    def everything(minibatch):
        return [x for part in minibatch.parts for x in (*part.rollouts.texts, part.rewards, part.advantages, part.ref_logprobs, part.loss_mask,
                                                        part.clipped, part.rollouts.logprobs)] + [repr(minibatch.table), minibatch.number]

    prompts, source, dealt = data_side()
    list(itertools.islice(dealt, stop))
    torch.save([prompts.state_dict(), collector_state(source), buffer_state(dealt)], tmp_path/'state.pt')
    expected = [everything(minibatch) for minibatch in itertools.islice(dealt, 8)]
    prompts, source, dealt = data_side()
    states = torch.load(tmp_path/'state.pt', weights_only=True)
    prompts.load_state_dict(states[0])
    restore_collector(source, states[1])
    restore_buffer(dealt, states[2], torch.device('cpu'))
    for found, wanted in zip([everything(minibatch) for minibatch in itertools.islice(dealt, 8)], expected, strict=True):
        assert all(torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b for a, b in zip(found, wanted, strict=True))


# what is trained, and the price of KL

def test_truncated_completions_train_nothing_where_asked():
    model = counting_policy(steps=0)    # untrained: every token is as likely as every other, the end token too
    for masked in (False, True):
        part = next(collector(model, env=0., prompts=10, max_new_tokens=5, mask_truncated=masked)).parts[0]
        assert part.clipped.any() and not part.clipped.all()
        expected = part.rollouts.completion_mask & ~(part.clipped[:, None] & masked)
        assert torch.equal(part.loss_mask, expected) and part.lengths.min() == 1


def test_the_price_of_the_kl_is_taken_from_the_rewards_before_the_advantages(model):
    source = collector(model, counting_policy(steps=5, seed=7))
    source.kl_coef = lambda: .3
    experience = next(source)
    prices = []
    for part in experience.parts:
        d, mask = part.rollouts.logprobs - part.ref_logprobs, part.rollouts.completion_mask
        prices.append(.3*torch.stack([d[i][mask[i]].sum() for i in range(len(mask))]))
        assert_close(part.rewards, torch.tensor(part.components['reward'].to_numpy(), dtype=torch.float32) - prices[-1], atol=1e-5, rtol=0)
    assert_close(torch.cat([part.advantages for part in experience.parts]), compute_advantages(torch.cat([part.rewards for part in experience.parts]), G))
    assert experience.metrics()['kl_penalty'] == pytest.approx(float(torch.cat(prices).mean()), rel=1e-4) and abs(prices[0]).max() > .01


def test_the_reference_may_have_a_device_of_its_own(model, monkeypatch):
    part = next(collector(model)).parts[0]
    seen = []
    monkeypatch.setattr(buffer_module, 'completion_hidden', lambda model, *inputs: seen.append({x.device.type for x in inputs[:4]}))
    monkeypatch.setattr(buffer_module, 'hidden_logprobs', lambda *inputs, **options: (part.ref_logprobs, None))
    found, _ = ask_reference(copy.deepcopy(model).to('meta'), part.rollouts, False)
    assert seen == [{'meta'}] and found is part.ref_logprobs    # asked there, answered here


@pytest.mark.skipif(not torch.cuda.is_available(), reason='needs a GPU')
def test_a_reference_on_the_gpu_answers_a_policy_on_the_cpu(model):
    part = next(collector(model, keep_ref_hidden=True)).parts[0]
    found = ask_reference(copy.deepcopy(model).to('cuda'), part.rollouts, True)
    for ours, theirs in zip((part.ref_logprobs, part.ref_hidden), found): assert_close(ours, theirs, atol=1e-4, rtol=1e-4)


def test_a_price_without_a_reference_is_refused(model):
    with pytest.raises(SettingError, match='needs a reference'):
        Collector(model, None, TASK.tokenizer, PromptMix(TASK.samples, 4, .5), TASK, kl_coef=lambda: .3)


@pytest.mark.parametrize('name', ROW_COLUMNS)
def test_a_score_may_not_be_called_as_a_column_of_the_completions(model, name):
    def scorer(prompts, completions, targets):
        scores = TASK(prompts, completions)
        return replace(scores, components=scores.components.assign(**{name: 0.}))
    with pytest.raises(BadScoresError, match=f"a column '{name}'"): next(collector(model, scorer=scorer))


# bad settings

@pytest.mark.parametrize('name', ['replays', 'capacity', 'minibatch_positions', 'max_age'])
@pytest.mark.parametrize('value', [0, -1, 1.5, '2', True])
def test_counts_must_be_counts(name, value):
    with pytest.raises(SettingError, match=name):
        BufferConfig(**{name: value})


def test_two_experiences_of_one_number_are_refused(model):
    one, other = next(collector(model)), next(collector(model))
    buffer = RolloutBuffer(iter([one, other]), BufferConfig(replays=1, capacity=2, minibatch_positions=8))
    with pytest.raises(SettingError, match='experience number 1 is stored already'): next(buffer)


@pytest.mark.parametrize('value', [2.5, '4', True])
def test_counts_of_a_collection_are_whole(value):
    for name in ('group_size', 'max_new_tokens', 'max_new_tokens_env'):
        with pytest.raises(SettingError, match=f'{name}=.* must be a whole number'): CollectorConfig(**{name: value})


@pytest.mark.parametrize('value', [-.1, 1.1, 'a', None])
def test_the_fresh_share_is_a_share(value):
    with pytest.raises(SettingError, match='fresh_share'):
        BufferConfig(fresh_share=value)


@pytest.mark.parametrize('options', [{'group_size': 1}, {'temperature': 0.}, {'temperature': -1.}, {'temperature': math.inf},
                                     {'temperature': math.nan}, {'max_new_tokens': 0}, {'max_new_tokens_env': -1},
                                     {'baseline': 'median'}, {'scale_rewards': 'task'}])
def test_bad_settings_name_themselves(options):
    with pytest.raises(ValueError, match=next(iter(options))):
        CollectorConfig(**options)


# the toy

def test_the_counting_task_scores():
    cases = {('P: 9', '0'): 1., ('P: 9', '1'): .2, ('P: 9', ''): -.3, ('P: 9', 'P:'): -.3, ('P: 9', '0 0'): -.3,
             ('A: 8', '9 0'): 1., ('A: 8', '9 1'): .6, ('A: 8', '9'): -.3, ('A: 8', 'nonsense at all'): -.3}
    scores = TASK(*zip(*cases))
    assert_close(scores.rewards, torch.tensor(list(cases.values())))
    assert isinstance(scores.components, pd.DataFrame) and len(scores.components) == len(cases)
    perfect = TASK([s.prompt for s in TASK.samples], [s.completion for s in TASK.samples])
    assert perfect.rewards.eq(1).all()


def test_the_counting_policy_leaves_global_random_numbers_alone(base):
    state = torch.get_rng_state()
    again = counting_policy()
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(a, b) for a, b in zip(base.parameters(), again.parameters()))


class HalfSilent:
    "A scorer whose engine says nothing about some prompts."
    def __init__(self, silent): self.silent = silent

    def __call__(self, prompts, completions, targets=None):
        scores = TASK(prompts, completions)
        unknown = np.arange(len(prompts)) % (3*G) >= 3*G - self.silent*G
        return Scores(scores.rewards.masked_fill(torch.tensor(unknown), 0.), scores.components.assign(raw=scores.components['raw'].mask(unknown)))


@pytest.mark.parametrize('options', [{'scale_rewards': 'batch'}, {'baseline': 'ema', 'scale_rewards': 'batch'}, {'kl_coef': lambda: .5}])
def test_what_was_not_judged_is_compared_with_nothing_and_moves_no_other(model, options):
    found = []
    for silent in (0, 1, 3):
        source = collector(model, env=0., prompts=3, scorer=HalfSilent(silent), **{k: v for k, v in options.items() if k != 'kl_coef'})
        source.kl_coef = options.get('kl_coef')
        found.append(next(source))
    whole, some, none = (experience.parts[0].advantages.view(3, G) for experience in found)
    assert some[2].eq(0).all() and none.eq(0).all() and whole[2].ne(0).any()
    rewards = found[0].parts[0].rewards[:2*G]
    kwargs = {name: value for name, value in options.items() if name != 'kl_coef'} | {'tracker': EMATracker(), 'tasks': ['P', 'P']}
    assert_close(some[:2].flatten(), compute_advantages(rewards, G, **{'scale_rewards': 'group'} | kwargs))
    alone = [experience.table['reward'][:2*G].to_numpy().reshape(2, G) for experience in found]
    assert found[1].metrics()['reward_std'] == pytest.approx(alone[1].std(1, ddof=1).mean())
    shown, judged = found[1].metrics(), alone[1]    # the rest neither lowers the mean reward nor counts as a tie
    assert [shown[name] for name in ('reward', 'task_P/reward', 'reward_75pct')] == pytest.approx([judged.mean(), judged.mean(), np.quantile(judged, .75)])
    assert shown['frac_reward_zero_std'] == np.mean(np.ptp(judged, 1) == 0)
    assert shown['completions/unjudged'] == pytest.approx(1/3)
    part = found[1].parts[0]
    assert not part.loss_mask[2*G:].any() and torch.equal(part.loss_mask[:2*G], part.rollouts.completion_mask[:2*G])


def test_a_digit_is_one_character():
    assert TASK(['P: 3', 'P: 3'], ['4', '45']).rewards.tolist() == pytest.approx([1., -.3])
