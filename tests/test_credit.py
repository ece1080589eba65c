"""Credit by part: places, earnings, advantages, and a run that uses them."""
import math
import random
import re
import statistics
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.testing import assert_close

from rookworld_nb.buffer import Collector, idle_groups, mean_advantages, stored_groups
from rookworld_nb.config import RunError, TrainConfig
from rookworld_nb.credit import PART_NAMES, PartCredit, earnings_table, part_advantages, share_with_list, token_parts
from rookworld_nb.grpo import EMATracker, compute_advantages
from rookworld_nb.kl import SettingError
from rookworld_nb.positions import shipped
from rookworld_nb.rewards import RewardConfig, RewardScorer
from rookworld_nb.run import Run
from rookworld_nb.sampling import Rollouts
from rookworld_nb.tasks import MAX_MOVES, env_parts, parse_env, parse_policy, policy_parts
from rookworld_nb.weights import load_pretrained

CFG = RewardConfig(reward_shaping='continuous', fen_scaling='linear')
SAMPLES = {task: [sample for sample in shipped('heldout') if sample.task == task][:40] for task in 'PA'}
PIECES = ['M:', 'E:', 'B:', 'P:', ' ', 'e2e4', 'd7d8q', 'z9', '0.3', '-1', '+', '8/8', '\n', '<|endoftext|>', 'é', '']


def answers(task: str, seed: int, count: int = 400) -> list[tuple]:
    """Prompts with answers that are right in some parts and wrong in others."""
    rng, found = random.Random(seed), []
    for _ in range(count):
        sample, other = rng.choice(SAMPLES[task]), rng.choice(SAMPLES[task])
        mine, foreign = (re.split(r'(\s+|\+)', each.completion) for each in (sample, other))
        for place in range(min(len(mine), len(foreign))):
            if rng.random() < .2: mine[place] = foreign[place]
        found.append((sample, ''.join(mine)))
    return found


def rollouts_of(tokenizer, texts, group_size):
    """Rollouts that say given texts; only ids, mask and texts are real."""
    rows = [tokenizer.encode(text).ids + [0] for text in texts]
    width = max(map(len, rows))
    ids = torch.tensor([row + [0]*(width - len(row)) for row in rows])
    mask = torch.tensor([[True]*len(row) + [False]*(width - len(row)) for row in rows])
    prompts = torch.zeros(len(texts)//group_size, 1, dtype=torch.int64)
    return Rollouts(prompts, prompts == 0, ids, mask, torch.zeros(ids.shape), texts, group_size, 1.)


@given(st.lists(st.sampled_from(PIECES), max_size=25))
def test_places_agree_with_the_parsers_on_any_text(pieces):
    text = ''.join(pieces)
    answer, env = parse_policy(text), parse_env(text)
    for parts in (policy_parts(text), env_parts(text)):
        names, spans = [part.name for part in parts], [(part.start, part.end) for part in parts]
        assert len(set(names)) == len(names) and all(0 <= start <= end <= len(text) for start, end in spans)
        assert all(a[1] <= b[0] for a, b in zip(sorted(spans), sorted(spans)[1:]))
    words = {part.name: text[part.start:part.end] for part in policy_parts(text)}
    if answer.fen is None and 'P:' not in text:
        assert [words.get(f'M{i}') for i, _ in enumerate(answer.moves[:MAX_MOVES], 1)] == list(answer.moves[:MAX_MOVES])
        assert [float(words[f'E{i}']) for i, _ in enumerate(answer.evals[:MAX_MOVES], 1)] == list(answer.evals[:MAX_MOVES])
        assert words.get('B1') == answer.best or answer.best is None
    if env.fen is None and not text.lstrip().startswith('A:') and text.count('+') < 6:
        assert ' '.join(text[slice(*env_parts(text)[0][1:])].split()) == env.new_fen_text
    for task in 'PA':
        owners = token_parts(task, pieces)
        assert len(owners) == len(pieces) and all(0 <= owner < len(PART_NAMES[task]) for owner in owners)


@pytest.mark.parametrize('task', 'PA')
def test_the_parts_add_up_to_the_blend(task):
    pairs = answers(task, 0)
    texts = [text for _, text in pairs]
    scores = RewardScorer(CFG)([s.prompt for s, _ in pairs], texts, [s.completion for s, _ in pairs])
    earned = earnings_table(task, texts, scores.judged, CFG)
    names = {'P': ['form', 'E:', 'B:', 'B1'], 'A': PART_NAMES['A']}[task]
    total = earned[:, [PART_NAMES[task].index(name) for name in names]].sum(1)
    raw = torch.tensor(scores.components['raw'].to_numpy())
    free = torch.tensor((scores.components['candidates'] > 0).to_numpy()) if task == 'P' else raw > 0
    assert free.sum() > 150 and len(raw[free].unique()) > 20
    assert_close(total[free], raw[free])


def test_the_best_move_shares_with_the_place_where_it_was_first_written():
    model, tokenizer = load_pretrained('nano')
    sample, names = SAMPLES['P'][0], PART_NAMES['P']
    moves = parse_policy(sample.completion).moves
    texts = [sample.completion.partition(' B:')[0] + f' B: {move}' for move in (*moves, 'a1a1', moves[0], moves[0])]
    judged = RewardScorer(CFG)([sample.prompt]*8, texts, [sample.completion]*8).judged
    rollouts = rollouts_of(tokenizer, texts, 8)
    found = PartCredit(CFG, tokenizer)('P', rollouts, judged)
    for row, ids in enumerate(rollouts.completion_ids.tolist()):
        owners = token_parts('P', [tokenizer.decode([i]) for i in ids])
        best = found[row, owners.index(names.index('B1'))]
        assert best != 0 and (found[row][torch.tensor(owners) == names.index('B1')] == best).all()
        for place in range(1, 6):
            share = found[row, owners.index(names.index(f'M{place}'))]
            assert share == (best if moves[place - 1] == parse_policy(texts[row]).best else 0)


def test_a_wrong_field_costs_its_own_tokens_alone():
    sample = next(sample for sample in SAMPLES['A'] if sample.completion.endswith('+0.001+0+0'))
    fields = sample.completion.split('+')
    texts = [sample.completion, *('+'.join([*fields[:i], wrong, *fields[i + 1:]]) for i, wrong in enumerate((f'{fields[0]}7', '0.5', '1', '1')))]
    judged = RewardScorer(CFG)([sample.prompt]*5, texts, [sample.completion]*5).judged
    right, *others = earnings_table('A', texts, judged, CFG).tolist()
    assert [[name for name, mine, best in zip(PART_NAMES['A'], row, right) if mine != best] for row in others] == [['fen'], ['reward'], ['terminated'], ['truncated']]


def test_what_was_not_written_and_what_cannot_be_read():
    sample = next(sample for sample in SAMPLES['P'] if len(parse_policy(sample.completion).moves) == 5)
    best = parse_policy(sample.completion).best
    texts = [sample.completion, re.sub(r'(M: \S+) \S+', r'\1 hello', sample.completion), f' M: {best} E: 0.0 B: {best}']
    judged = RewardScorer(CFG)([sample.prompt]*3, texts, [sample.completion]*3).judged
    full, broken, short = (dict(zip(PART_NAMES['P'], row)) for row in earnings_table('P', texts, judged, CFG).tolist())
    assert all(full[f'M{i}'] > 0 for i in range(1, 6)) and short['M1'] > 0 and [short[f'M{i}'] for i in range(2, 6)] == [0]*4
    mild = earnings_table('P', texts, judged, replace(CFG, illegal_cost=.25))[1, PART_NAMES['P'].index('M2')]
    assert mild == pytest.approx(-.25*full['M2'])    # as an illegal move
    assert broken['M1'] > 0 > broken['M2'] and [broken[f'M{i}'] for i in range(3, 6)] == [0]*3
    assert short['E:'] == broken['E:'] == short['M1'] and full['E:'] > short['E:'] and math.isnan(short['E2'])


def test_spaces_before_a_label_end_the_list():
    pieces = [' M', ':', ' e', '2', 'e', '4', '      ', ' E', ':', ' 0', '.', '1', '     ', ' B', ':', ' e', '2', 'e', '4', '']
    owners = [PART_NAMES['P'][part] for part in token_parts('P', pieces)]
    assert owners == ['form']*2 + ['M1']*4 + ['E:']*3 + ['E1']*3 + ['B:']*3 + ['B1']*4 + ['form']


def test_a_rare_part_is_bounded_and_groups_without_a_judgement_do_not_count():
    earned = torch.zeros(256, 1)
    earned[0] = -1
    compare = partial(compute_advantages, scale_rewards='batch')
    assert compare(earned[:, 0], 8)[0] < -10 and part_advantages(earned, 'a', 8, compare)[0] == -5 == -part_advantages(-earned, 'a', 8, compare)[0]
    some = torch.rand(16, 1, generator=torch.Generator().manual_seed(0))
    with_unknown = torch.cat([some, torch.full((16, 1), float('nan'))])
    assert_close(part_advantages(with_unknown, 'a', 8, compare)[:16], part_advantages(some, 'a', 8, compare))


def test_the_best_move_pays_into_its_place_in_the_list_beside_what_that_earned():
    advantages = torch.zeros(1, len(PART_NAMES['P']))
    advantages[0, PART_NAMES['P'].index('M2')], advantages[0, PART_NAMES['P'].index('B1')] = -2., 1.
    shared = share_with_list(advantages, ['M: e2e4 d2d4 E: 0.1 0.1 B: d2d4'])
    assert shared[0, PART_NAMES['P'].index('M2')] == -1 and shared[0, PART_NAMES['P'].index('B1')] == 1 and shared.ne(0).sum() == 2


@pytest.mark.parametrize('setting', [{'reward_shaping': 'graduated'}, {'candidates_scaling': 'sigmoid'}, {'evals_scaling': 'quadratic'}, {'flags_scaling': 'exponential'}, {'normalize_rewards': True}, {'reward_warmup_steps': 3}])
def test_rewards_that_are_of_whole_answers_are_refused(setting):
    with pytest.raises(ValueError, match=f'{next(iter(setting))}=.*whole answers'):
        PartCredit(replace(CFG, **setting), load_pretrained('nano')[1])


def test_a_list_that_ends_early_is_charged_to_the_label_that_ends_it():
    model, tokenizer = load_pretrained('nano')
    sample = next(sample for sample in SAMPLES['P'] if len(parse_policy(sample.completion).moves) == 5)
    answer = parse_policy(sample.completion)
    def text(count): return f' M: {" ".join(answer.moves[:count])} E: {" ".join(map(str, answer.evals[:count]))} B: {answer.best}'
    texts = [text(5)]*3 + [text(2)]
    judged = RewardScorer(CFG)([sample.prompt]*4, texts, [sample.completion]*4).judged
    rollouts = rollouts_of(tokenizer, texts, 4)
    advantages = PartCredit(CFG, tokenizer)('P', rollouts, judged)
    shown = mean_advantages(SimpleNamespace(advantages=advantages, rollouts=rollouts))    # what a table says of an answer: of its own tokens alone
    assert_close(shown, torch.stack([row[mask].mean() for row, mask in zip(advantages, rollouts.completion_mask)]))
    end = rollouts.completion_ids.tolist()[3].index(tokenizer.token_to_id(' E:'))
    assert advantages[3, end] < -1 and advantages[3, 1:end].abs().max() == 0 and advantages[:, 0].abs().max() == 0


@pytest.mark.parametrize('scale', ['group', 'batch', 'none'])
@pytest.mark.parametrize('baseline', ['group_mean', 'leave_one_out', 'adaptive', 'ema'])
def test_each_column_is_plain_grpo(baseline, scale):
    generator, tracker = torch.Generator().manual_seed(0), EMATracker()
    earned = torch.rand(24, 3, generator=generator, dtype=torch.float64)
    compare = partial(compute_advantages, baseline=baseline, scale_rewards=scale)
    found = part_advantages(earned, 'abc', 8, partial(compare, tracker=tracker))
    for column in range(3): assert_close(found[:, column], compare(earned[:, column], 8))
    assert set(tracker.averages) == (set('abc') if baseline == 'ema' else set())


def test_nothing_is_learned_where_nothing_is_known():
    nan = float('nan')
    earned = torch.tensor([[1., nan], [0., nan], [.2, 3.], [.2, 3.], [nan, .5], [nan, .1]])
    found = part_advantages(earned, 'ab', 2)
    assert found[:2, 1].eq(0).all() and found[2:4].eq(0).all() and found[4:, 0].eq(0).all()
    assert found[0, 0] > .7 and found[1, 0] < -.7 and found[4, 1] > .7 and found[5, 1] < -.7
    for rest in ([0., .5], [0., 0.]):    # what one of four has not said counts for the others as their mean, and for itself as nothing
        partly = part_advantages(torch.tensor([[1.], *([x] for x in rest), [nan]]), 'a', 4, partial(compute_advantages, baseline='adaptive', scale_rewards='none'))
        assert partly[3] == 0 and partly[0] - partly[1] == pytest.approx(1.) and partly[0] == pytest.approx(1 - statistics.median([1., *rest, (1 + sum(rest))/3]))
    model, tokenizer = load_pretrained('nano')
    pairs = answers('P', 1, 8)
    rollouts = rollouts_of(tokenizer, [text for _, text in pairs], 8)
    assert PartCredit(CFG, tokenizer)('P', rollouts, [None]*8).eq(0).all()


def test_a_run_pays_parts_and_says_so(tmp_path):
    config = TrainConfig(steps=1, batch_positions=4, group_size=4, eval_policy=0, eval_env=0, max_new_tokens=40, mix_env_ratio=.5)
    runs = {credit: Run(replace(config, credit=credit, output_dir=str(tmp_path/str(credit)))) for credit in (None, 'part', 'answer')}
    rows = {credit: list(run.steps()) for credit, run in runs.items()}
    grads = {credit: [row['grad_norm'] for row in found] for credit, found in rows.items()}
    assert grads[None] == grads['part'] and grads['part'][0] != grads['answer'][0]
    assert rows['part'][0]['reward'] == rows['answer'][0]['reward']
    assert [runs[credit].config.credit for credit in runs] == ['part', 'part', 'answer']


@pytest.mark.parametrize('setting', [{'use_gae': True}, {'kl_in_reward': True}, {'normalize_rewards': True}, {'reward_warmup_steps': 5},
                                     {'reward_shaping': 'ladder'}, {'importance_level': 'sequence'}])
def test_settings_that_act_on_whole_answers(setting):
    asked, flag = TrainConfig(**setting), next(iter(setting)).replace('_', '-')
    assert asked.for_size(1).credit == 'answer' and TrainConfig(reward_shaping='linear').for_size(1).credit == 'part'
    with pytest.raises(RunError, match=f'--{flag}.*--credit answer'): replace(asked, credit='part')
    with pytest.raises(ValueError, match='--credit half.*part.*answer'): TrainConfig(credit='half')


def test_groups_are_dropped_where_nothing_can_be_learned(tmp_path):
    run = Run(TrainConfig(steps=1, batch_positions=6, group_size=2, eval_policy=0, eval_env=0, max_new_tokens=40, output_dir=str(tmp_path/'run'), temperature=.3,
                          drop_tied=True))
    experience = next(run.collector)
    kept = stored_groups(experience, 0, 0, True)
    expected = [(at, prompt) for at, part in enumerate(experience.parts) for prompt in range(len(part.samples))
                if (part.advantages*part.loss_mask).view(len(part.samples), -1).any(1)[prompt]]
    assert [(group.part, group.prompt) for group in kept] == expected and 0 < len(expected) < experience.num_groups
    part = experience.parts[0]
    same = replace(part, rewards=torch.zeros_like(part.rewards))
    assert idle_groups(same) == idle_groups(part) and not all(idle_groups(part))
    assert all(idle_groups(replace(part, advantages=torch.zeros_like(part.rewards))))


def test_a_price_of_the_kl_belongs_to_whole_answers(tmp_path):
    run = Run(TrainConfig(eval_policy=0, eval_env=0, output_dir=str(tmp_path/'run')))
    with pytest.raises(ValueError, match='no credit by part'):
        Collector(run.model, run.reference, run.tokenizer, [], run.scorer, kl_coef=lambda: 1., credit=run.collector.credit)


def test_a_task_without_known_parts_is_refused():
    with pytest.raises(SettingError, match='credit: task letters has no parts that are known; only P and A have'):
        PartCredit(RewardConfig(reward_shaping='continuous'), load_pretrained('nano')[1])('letters', None, [])
