"""Right answers: the log-probability is that of whole answers, the order is a function of the step, and a trainer adds exactly the gradient of their chance."""
import copy
from collections import Counter
from dataclasses import replace

import pytest
import torch
from tokenizers import Tokenizer
from torch.testing import assert_close

from rookworld_nb.answers import RightAnswers, answer_logprobs, encode_answers, right_answer
from rookworld_nb.buffer import Collector, CollectorConfig
from rookworld_nb.kl import KLConfig, SettingError
from rookworld_nb.positions import DataError, PromptMix, Sample, by_task, outcome, shipped
from rookworld_nb.sampling import PromptLengthError
from rookworld_nb.tasks import parse_env
from rookworld_nb.trainer import Learning, Trainer, TrainerConfig, accumulate_gradients, items_of, learn_answers, speed
from rookworld_nb.weights import end_token_id, load_pretrained
from toy import TASK

#: Answers of one and two digits to prompts of one to three tokens: padding on both sides.
UNEVEN = [Sample('P: 1', '2'), Sample('A: 3', '4 5'), Sample('A: 3 4 5', '6'), Sample('P: 1 2', '3 4')]
#: The policy gives these chances of .05 to .4, and UNEVEN's last two hardly any.
LIKELY = [Sample('P: 1', '2'), Sample('A: 1', '2 3'), Sample('P: 9', '0'), Sample('A: 0', '1 2')]


@pytest.fixture(scope='module')
def nano():
    return load_pretrained('nano')


@pytest.fixture(scope='module')
def pool():
    return by_task(shipped('train'))['A']


def gradients(model):
    found = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    model.zero_grad()
    return found


def experience_of(model, env=0.):
    config = CollectorConfig(group_size=4, temperature=1., max_new_tokens=2, max_new_tokens_env=3)
    return next(Collector(model, copy.deepcopy(model), TASK.tokenizer, PromptMix(TASK.samples, 4, env), TASK, config))


def settings(**options):
    return TrainerConfig(**{'steps': 30, 'lr': 3e-3, 'warmup_steps': 0, 'kl': KLConfig(kl_coef=.01), 'kl_divergence_threshold': None} | options)


# the log-probability

def test_the_log_probability_of_an_answer_is_that_of_all_its_tokens_read_alone(base):
    end = end_token_id(TASK.tokenizer)
    for sample, logprob in zip(UNEVEN, answer_logprobs(base, encode_answers(TASK.tokenizer, UNEVEN))):
        prompt, answer = (TASK.tokenizer.encode(text, add_special_tokens=False).ids for text in (sample.prompt, sample.completion))
        ids = torch.tensor([[*prompt, *answer, end]])
        logprobs = base.logits(base.hidden(ids[:, :-1])).log_softmax(-1)[0].gather(1, ids[0, 1:, None]).squeeze(1)
        assert logprob.item() == pytest.approx(logprobs[len(prompt) - 1:].sum().item(), rel=1e-5)


def test_rows_are_the_same_answers(base):
    answers = encode_answers(TASK.tokenizer, UNEVEN)
    logprobs = answer_logprobs(base, answers)
    assert len(answers) == 4 and [len(some) for some in answers.pieces(3)] == [3, 1] and [*answers.rows(slice(0)).pieces(2)] == []
    assert_close(answer_logprobs(base, answers.rows(slice(1, 3))), logprobs[1:3])
    assert_close(torch.cat([answer_logprobs(base, some) for some in answers.pieces(3)]), logprobs)


def test_padding_of_the_tokenizer_is_no_answer_and_one_that_cuts_is_refused():
    tokenizer = Tokenizer.from_str(TASK.tokenizer.to_str())
    tokenizer.enable_padding(length=9)
    padded, plain = (encode_answers(which, UNEVEN) for which in (tokenizer, TASK.tokenizer))
    assert torch.equal(padded.completion_ids, plain.completion_ids) and torch.equal(padded.completion_mask, plain.completion_mask)
    tokenizer.no_padding()
    tokenizer.enable_truncation(1)
    with pytest.raises(PromptLengthError, match='cuts'): encode_answers(tokenizer, UNEVEN)


# what is right

def test_the_rules_answer_whatever_is_stored(nano, pool):
    assert all(right_answer(sample.prompt) == sample for sample in (*pool[::400], *by_task(shipped('stress'))['A'][::100]))
    wrong = [replace(sample, completion=pool[0].completion) for sample in pool[:50]]
    shown = RightAnswers(wrong, nano[1], 50)
    told = shown(1)
    texts = nano[1].decode_batch([ids[mask].tolist() for ids, mask in zip(told.completion_ids, told.completion_mask)])
    assert texts == [right_answer(shown.stream[number].prompt).completion for number in range(50)] and texts.count(pool[0].completion) < 3


def test_a_longer_history_stays_in_the_prompt():
    prompt = 'A: r1bqkbnr/pppp1ppp/2n5/4p3/4P3/5N2/PPPP1PPP/RNBQKB1R w KQkq - 2 3+f1b5+b8c6 f1b5+'
    assert right_answer(prompt) == Sample(prompt, 'r1bqkbnr/pppp1ppp/2n5/1B2p3/4P3/5N2/PPPP1PPP/RNBQK2R b KQkq - 3 3+0.001+0+0')


def outcomes(samples):
    return Counter(outcome(parse_env(sample.completion)) for sample in samples)


def test_every_legal_prompt_comes_once_before_one_comes_again(nano, pool):
    some = pool[::12]
    legal = [one.prompt for one in some if outcomes([one])['illegal'] == 0]
    shown = RightAnswers([*shipped('train')[:5], *some], nano[1], 16, seed=2)    # P: lines are not asked
    dealt = [shown.stream[number] for number in range(round(len(legal)/.92))]
    assert 380 < len(legal) < 390 and sorted(one.prompt for one in dealt if not outcomes([one])['illegal']) == sorted(legal)
    answers = [shown(step) for step in (1, 2, 3)]
    assert torch.equal(answers[2].prompt_ids, RightAnswers(some, nano[1], 16, seed=2)(3).prompt_ids)
    assert not torch.equal(answers[0].prompt_ids, RightAnswers(some, nano[1], 16, seed=3)(1).prompt_ids)
    second = encode_answers(nano[1], [right_answer(shown.stream[number].prompt) for number in range(16, 32)])    # none of the first step's
    assert torch.equal(answers[1].prompt_ids, second.prompt_ids)


def test_eight_in_a_hundred_are_illegal_moves_made_for_it(nano, pool):
    shown = RightAnswers(pool, nano[1], 64, seed=1)
    dealt = [shown.stream[number] for number in range(1000)]
    made = [one for one in dealt if outcomes([one])['illegal']]
    assert len(made) == 80 and {one.fen for one in made} <= {one.fen for one in pool}
    assert len({one.prompt for one in made} - {one.prompt for one in pool}) > 75
    again, other = (RightAnswers(pool, nano[1], 64, seed=seed) for seed in (1, 2))
    assert again.stream[999] == dealt[999] and [shown.stream[n] for n in range(12, 1000, 25)] != [other.stream[n] for n in range(12, 1000, 25)]


def test_without_a_legal_move_there_is_nothing_to_answer(nano, pool):
    illegal = [one for one in pool if outcomes([one])['illegal']]
    for samples in (by_task(shipped('train'))['P'][:3], illegal):
        with pytest.raises(DataError, match='no A: prompt with a legal move'): RightAnswers(samples, nano[1])


# beside an update

@pytest.mark.parametrize('device', ['cpu', pytest.param('cuda', marks=pytest.mark.skipif(not torch.cuda.is_available(), reason='needs a GPU'))])
@pytest.mark.parametrize('size', [None, 1, 4])
def test_the_gradient_of_their_chance_is_added_and_what_is_wrong_reported(base, size, device):
    model, answers = copy.deepcopy(base).to(device), encode_answers(TASK.tokenizer, UNEVEN + LIKELY).to(device)
    experience, config = experience_of(model), settings(answer_coef=.7, micro_batch_size=size)
    learning = Learning(model, config, .01, items_of(experience, 'dapo'), 8, 3)
    before, _ = accumulate_gradients(learning, experience)
    alone = gradients(model)
    chance = answer_logprobs(model, answers).exp().mean()
    chance.backward()
    right = gradients(model)
    after, _ = accumulate_gradients(replace(learning, answers=answers), experience)
    assert_close(gradients(model), alone - .7*right, rtol=1e-4, atol=1e-6)
    assert right.norm() > .1 and after.pop('answers_wrong') == pytest.approx(1 - chance.item(), rel=1e-5) and after == pytest.approx(before)
    assert learn_answers(learning) == {}


def test_what_is_taught_beside_is_learned(base):
    asked = by_task(TASK.samples)['A']

    def after(coef):
        model = copy.deepcopy(base)
        trainer = Trainer(model, settings(answer_coef=coef), copy.deepcopy(base), answers=lambda step: encode_answers(TASK.tokenizer, asked[step % 7::7]))
        rows = list(trainer.run([experience_of(model)]*30))
        with torch.no_grad(): return answer_logprobs(model, encode_answers(TASK.tokenizer, asked)).exp().mean().item(), rows
    (without, plain), (with_them, rows) = after(0.), after(.5)
    assert 'answers_wrong' not in plain[0] and rows[-1]['answers_wrong'] < rows[0]['answers_wrong'] and with_them > 3*without


def test_a_weight_without_answers_is_refused_and_answers_without_a_weight_are_not_made(base):
    with pytest.raises(SettingError, match='answer_coef=0.5 needs right answers'): Trainer(base, settings(answer_coef=.5))
    for wrong in (-1., float('inf'), float('nan')):
        with pytest.raises(SettingError, match='answer_coef'): settings(answer_coef=wrong)

    def never(step): raise AssertionError
    model = copy.deepcopy(base)
    assert len(list(Trainer(model, settings(steps=1), answers=never).run([experience_of(model)]))) == 1


def test_an_update_without_a_token_of_its_own_asks_for_none(base):
    def never(step): raise AssertionError
    model = copy.deepcopy(base)
    experience = experience_of(model)
    silent = replace(experience, parts=tuple(replace(part, loss_mask=torch.zeros_like(part.loss_mask)) for part in experience.parts))
    row, = Trainer(model, settings(steps=1, answer_coef=.5), answers=never).run([silent])
    assert row['skipped_updates'] == 1 and row['grad_norm'] == 0


def test_answers_that_are_not_finite_leave_the_update_out(base):
    model = copy.deepcopy(base)
    trainer = Trainer(model, settings(steps=1, answer_coef=1e38), answers=lambda step: encode_answers(TASK.tokenizer, UNEVEN))    # the gradient overflows
    before = [p.clone() for p in model.parameters()]
    row, = trainer.run([experience_of(model)])
    assert row['skipped_updates'] == 1 and all(torch.equal(p, was) for p, was in zip(model.parameters(), before))
    assert not any(trainer.broken['broken']) and row['answers_wrong'] > 0    # no completion is to blame


def test_utilisation_counts_them(base, monkeypatch):
    monkeypatch.setattr('rookworld_nb.trainer.product_rate', lambda device, bf16: 1e6)
    experience = experience_of(base)
    learning = Learning(base, settings(), .01, 1, 1, 3)
    before, after = (speed(replace(learning, answers=answers), experience, 1.) for answers in (None, encode_answers(TASK.tokenizer, UNEVEN[:1])))
    tokens, cfg = TASK.tokenizer.encode('P: 1').ids, base.cfg
    read = len(tokens) + 1    # the end token is written, not read
    needed = 2*12*cfg.n_embd**2*cfg.n_layer*read + 2*cfg.vocab_size*cfg.n_embd*2 + 4*cfg.n_layer*cfg.n_embd*read*(read + 1)//2
    assert after['perf/mfu'] - before['perf/mfu'] == pytest.approx(3*needed/1e6, rel=1e-6)
    assert after['perf/train_tok_s'] - before['perf/train_tok_s'] == pytest.approx(2)
