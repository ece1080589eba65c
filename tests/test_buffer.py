"""The buffer: what an experience holds, against brute force; when things are sampled; what is asked how often."""
import copy
import itertools
import math
import statistics

import pandas as pd
import pytest
import torch
from torch.testing import assert_close

from rookworld_nb.buffer import Collector, CollectorConfig, CountingTask, counting_policy, replay
from rookworld_nb.grpo import EMATracker, compute_advantages
from rookworld_nb.kl import SettingError
from rookworld_nb.model import GPT
from rookworld_nb.positions import PromptMix, Sample
from rookworld_nb.rewards import Scores
from rookworld_nb.sampling import completion_logprobs

TASK = CountingTask()
G = 4


@pytest.fixture(scope='module')
def base():
    return counting_policy()


@pytest.fixture
def model(base):
    return copy.deepcopy(base)


def collector(model, ref_model='copy', env=.5, prompts=4, scorer=TASK, **options):
    reference = copy.deepcopy(model) if ref_model == 'copy' else ref_model
    config = CollectorConfig(**{'group_size': G, 'temperature': 1., 'max_new_tokens_policy': 2, 'max_new_tokens_env': 3, **options})
    return Collector(model, reference, TASK.tokenizer, PromptMix(TASK.samples, prompts, env), scorer, config)


def logprobs(model, part):
    r = part.rollouts
    with torch.no_grad():
        return completion_logprobs(model, r.prompt_ids, r.prompt_mask, r.completion_ids, r.group_size, r.temperature, r.completion_mask)[0]


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
    assert experience.max_completion_length == longest
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
    short = next(collector(model, env=0., prompts=10, max_new_tokens_policy=1)).parts[0]
    assert short.clipped.tolist() == [text != '' for text in short.rollouts.texts]
    long = next(collector(model, env=0., prompts=10, max_new_tokens_policy=4)).parts[0]
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
    ordered = sorted(rewards)

    def quantile(q):
        at = q*(len(ordered) - 1)
        low, high = ordered[math.floor(at)], ordered[math.ceil(at)]
        return low + (at - math.floor(at))*(high - low)

    expected = {
        'reward': statistics.fmean(rewards), 'reward_std': statistics.fmean(map(statistics.stdev, groups)),
        'reward_25pct': quantile(.25), 'reward_75pct': quantile(.75),
        'frac_reward_zero_std': sum(len(set(group)) == 1 for group in groups)/len(groups),
        'task_P/reward': statistics.fmean(r for t, r, *_ in rows if t == 'P'),
        'task_A/reward': statistics.fmean(r for t, r, *_ in rows if t == 'A'), 'task_P/fraction': .5,
        'completions/mean_length': statistics.fmean(lengths), 'completions/min_length': min(lengths),
        'completions/max_length': max(lengths), 'completions/clipped_ratio': statistics.fmean(c for *_, c in rows),
        'num_tokens': source.num_tokens, 'perf/gen_tok_s': sum(lengths)/experience.gen_seconds}
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
    config = CollectorConfig(group_size=G, max_new_tokens_policy=2)
    next(Collector(model, None, TASK.tokenizer, [[Sample('P: 1', ''), Sample('P: 2', '3')]], scorer, config))
    assert scorer.calls[0][2] == [None]*G + ['3']*G


def test_the_reference_reads_every_prompt_once_however_often_it_is_replayed(model):
    reference = ReadingReference(model.cfg)
    seen = list(itertools.islice(replay(collector(model, reference), 3), 6))
    assert reference.read == 2*4 and len({id(experience) for experience in seen}) == 2


def test_collecting_is_lazy(model):
    asked = []

    def prompts():
        for number in itertools.count():
            asked.append(number)
            yield TASK.samples[:2]

    source = Collector(model, None, TASK.tokenizer, prompts(), TASK, CollectorConfig(group_size=G, max_new_tokens_policy=2))
    stream = replay(source, 2)
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
    source = Collector(model, None, TASK.tokenizer, [TASK.samples[:1]]*2, TASK, CollectorConfig(group_size=G, max_new_tokens_policy=2))
    assert len(list(source)) == 2


def test_the_seed_decides_and_nothing_else(model):
    def texts(seed):
        return [e.table['completion'].tolist() for e in itertools.islice(collector(model, seed=seed), 2)]
    torch.manual_seed(1)
    first = texts(0)
    state = torch.get_rng_state()
    assert texts(0) == first and torch.equal(torch.get_rng_state(), state)
    assert texts(1) != first


@pytest.mark.parametrize('replays', [1, 2, 5])
def test_replay_hands_out_the_same_object(replays):
    assert list(replay(iter('ab'), replays)) == ['a']*replays + ['b']*replays


# bad settings

@pytest.mark.parametrize('replays', [0, -1, 1.5, '2', True - 1])
def test_replays_must_be_a_count(replays):
    with pytest.raises(SettingError, match='replays'):
        replay([], replays)


@pytest.mark.parametrize('options', [{'group_size': 1}, {'temperature': 0.}, {'temperature': -1.}, {'temperature': math.inf},
                                     {'temperature': math.nan}, {'max_new_tokens_policy': 0}, {'max_new_tokens_env': -1},
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
