"""Sampling and scoring: padding, caching, stopping, frequencies, determinism, refusals."""
import copy
import dataclasses
import itertools
import math
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode

from rookworld_nb import sampling
from rookworld_nb.model import GPT, GPTConfig
from rookworld_nb.sampling import (PromptLengthError, SamplingError, completion_hidden, completion_logprobs, draw,
                                   encode_prompts, generate, length_buckets, sample)
from rookworld_nb.weights import load_pretrained

WORDS = ['<|endoftext|>', *'abcdefghijklmnopqrstuvw']
END = 0


@pytest.fixture(scope='module')
def tokenizer() -> Tokenizer:
    'One word, one token; the end token is also the pad.'
    tok = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token=WORDS[0]))
    tok.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return tok


def make_model(n_positions: int = 64, sharpness: float = 6., end_bias: float = 0.) -> GPT:
    'A random model whose next-token distributions are uneven enough to tell rows apart.'
    torch.manual_seed(3)
    model = GPT(GPTConfig(n_layer=2, n_head=2, n_embd=16, vocab_size=len(WORDS), n_positions=n_positions))
    with torch.no_grad():
        for p in model.parameters():
            if p.dim() == 2: p.mul_(sharpness)
        model.wte.weight[END] += end_bias*model.ln_f.weight/16
    return model


@pytest.fixture(scope='module')
def model() -> GPT: return make_model()


def seeded(seed: int = 0) -> torch.Generator: return torch.Generator().manual_seed(seed)


PROMPTS = ['a b c', 'd', 'e f g h i j k', 'l m n o']


def full_logprobs(model, r, row, temperature=None):
    'Log-probabilities of one row from a plain forward of its unpadded text, one row, no cache.'
    prompt = r.prompt_ids[row//r.group_size][r.prompt_mask[row//r.group_size]]
    done = r.completion_ids[row][r.completion_mask[row]]
    logits = model(torch.cat([prompt, done])[None])[0, len(prompt)-1:-1].float()
    logprobs = (logits/(temperature or r.temperature or 1.)).log_softmax(-1)
    return logprobs.gather(1, done[:, None])[:, 0], logprobs


# ---------------------------------------------------------------- agreement of sampler, scorer and a full forward

@pytest.mark.parametrize('temperature', [0.7, 1., 1.8])
def test_cached_decode_equals_a_full_forward(model, tokenizer, temperature):
    r = sample(model, tokenizer, PROMPTS, 5, 20, temperature, seeded())
    lengths = r.completion_mask.sum(1)
    assert lengths.min() < lengths.max()  # rows end at different times, so compaction is at work
    with torch.no_grad():
        for row in range(len(lengths)):
            assert_close(r.logprobs[row, :lengths[row]], full_logprobs(model, r, row)[0], atol=1e-5, rtol=0)
    assert r.logprobs[~r.completion_mask].eq(0).all() and r.logprobs.dtype == torch.float32


@pytest.mark.parametrize('temperature', [0., 0.7, 1.8])
def test_scorer_equals_sampler(model, tokenizer, temperature):
    r = sample(model, tokenizer, PROMPTS, 5, 20, temperature, seeded())
    logprobs, entropy = completion_logprobs(model, r.prompt_ids, r.prompt_mask, r.completion_ids, r.completion_mask, 5,
                                            temperature)
    assert_close(logprobs.detach(), r.logprobs, atol=1e-5, rtol=0)
    for row in range(len(r.texts)):
        every = full_logprobs(model, r, row)[1]
        assert_close(entropy[row, :len(every)], -(every.exp()*every).sum(-1), atol=1e-5, rtol=0)
        assert entropy[row, len(every):].eq(0).all()


def test_a_row_alone_equals_the_row_in_any_batch(model, tokenizer):
    r = sample(model, tokenizer, PROMPTS, 3, 16, 1., seeded())
    for row, text in enumerate(r.texts):
        i, n = row//3, int(r.completion_mask[row].sum())
        ids, mask = encode_prompts(tokenizer, PROMPTS[i:i+1], END)
        done, active = r.completion_ids[row:row+1], r.completion_mask[row:row+1]
        alone, _ = completion_logprobs(model, ids, mask, done, active, 1, 1.)
        assert_close(alone[0, :n].detach(), r.logprobs[row, :n], atol=1e-5, rtol=0)


@pytest.mark.parametrize('extra', [1, 9])
def test_left_and_right_padding_change_nothing(model, tokenizer, extra):
    r = sample(model, tokenizer, PROMPTS, 3, 16, 1., seeded())
    B, P = r.prompt_ids.shape
    left, right = torch.full((B, P+extra), END), torch.full((B, P+extra), END)
    left_mask, right_mask = torch.zeros_like(left, dtype=torch.bool), torch.zeros_like(left, dtype=torch.bool)
    for i, n in enumerate(r.prompt_mask.sum(1).tolist()):
        left[i, P+extra-n:], left_mask[i, P+extra-n:] = r.prompt_ids[i, P-n:], True
        right[i, :n], right_mask[i, :n] = r.prompt_ids[i, P-n:], True
    for ids, mask in ((left, left_mask), (right, right_mask)):
        logprobs, _ = completion_logprobs(model, ids, mask, r.completion_ids, r.completion_mask, 3, 1.)
        assert_close(logprobs.detach(), r.logprobs, atol=1e-5, rtol=0)
        got, got_mask, got_logprobs = generate(model, ids, mask, 3, 16, 1., END, seeded())
        assert got.equal(r.completion_ids) and got_mask.equal(r.completion_mask)
        assert_close(got_logprobs, r.logprobs, atol=1e-5, rtol=0)


def test_greedy_is_the_argmax_of_a_full_forward_at_every_step(model, tokenizer):
    r = sample(model, tokenizer, PROMPTS, 2, 12, 0.)
    with torch.no_grad():
        for row in range(len(r.texts)):
            ids = r.prompt_ids[row//2][r.prompt_mask[row//2]].tolist()
            for t in range(int(r.completion_mask[row].sum())):
                best = int(model(torch.tensor([ids]))[0, -1].argmax())
                assert best == r.completion_ids[row, t]
                ids.append(best)
            ended = END in r.completion_ids[row, :int(r.completion_mask[row].sum())]
            assert ended or r.completion_mask[row].all()


# ---------------------------------------------------------------- cost: one reading per prompt, nothing for ended rows

def test_each_prompt_is_read_once_and_ended_rows_cost_nothing(model, tokenizer, monkeypatch):
    prefills, steps = [], []
    prefill, extend = GPT.prefill, GPT.extend
    monkeypatch.setattr(GPT, 'prefill', lambda self, ids, *a: prefills.append(len(ids)) or prefill(self, ids, *a))
    monkeypatch.setattr(GPT, 'extend', lambda self, ids, *a: steps.append(tuple(ids.shape)) or extend(self, ids, *a))
    r = sample(model, tokenizer, PROMPTS, 6, 20, 1., seeded())
    assert prefills == [len(PROMPTS)]
    unfinished = (r.completion_mask & (r.completion_ids != END)).sum(0).tolist()
    last = r.completion_ids.shape[1]-1
    assert steps == [(n, 1) for n in unfinished[:last] if n]  # never an ended row, nothing behind the last token
    assert r.completion_mask.any(0).all()  # no column is all padding


def test_scoring_reads_each_prompt_once(model, tokenizer, monkeypatch):
    r = sample(model, tokenizer, PROMPTS, 4, 20, 1., seeded())
    rows, prefill = [], GPT.prefill
    monkeypatch.setattr(GPT, 'prefill', lambda self, ids, *a: rows.append(len(ids)) or prefill(self, ids, *a))
    completion_logprobs(model, r.prompt_ids, r.prompt_mask, r.completion_ids, r.completion_mask, 4, 1.)
    assert sum(rows) == len(PROMPTS)


# ---------------------------------------------------------------- stopping and the mask

def test_a_row_stops_at_its_own_end_token_which_is_in_the_mask_once(model, tokenizer):
    r = sample(model, tokenizer, PROMPTS, 8, 24, 1., seeded(1))
    is_end = r.completion_ids == END
    for ids_end, mask in zip(is_end, r.completion_mask):
        n = int(mask.sum())
        assert mask[:n].all() and not mask[n:].any()                        # a run from the first token on
        assert int((ids_end & mask).sum()) == int(n < len(mask) or bool(ids_end[-1]))  # its end token, exactly once
        assert not ids_end[:n-1].any()                                      # and only as the last
    assert is_end[~r.completion_mask].all()                                 # pad is the same id, and is not in the mask
    assert (is_end & r.completion_mask).any() and (~r.completion_mask).any()


def test_pad_equal_to_end_does_not_fool_the_mask(model, tokenizer):
    r = sample(model, tokenizer, PROMPTS, 8, 24, 1., seeded(1))
    by_id = r.completion_ids != END
    assert not by_id.equal(r.completion_mask)
    assert by_id.sum() < r.completion_mask.sum()  # a mask by id would lose every end token


def ends_at(lengths):
    'A `draw` whose row r draws its end token at step lengths[r]-1 and not before; the others are real draws.'
    real, state = sampling.draw, dict(t=0, rows=torch.arange(len(lengths)))
    lengths = torch.tensor(lengths)
    def rigged(logits, temperature, noise):
        ids, _ = real(logits, temperature, noise)
        ids[ids == END] = 1
        over = lengths[state['rows']] == state['t']+1
        ids[over] = END
        state.update(t=state['t']+1, rows=state['rows'][~over])
        return ids, (logits.float()/temperature).log_softmax(-1).gather(1, ids[:, None])[:, 0]
    return rigged


@settings(max_examples=15)
@given(st.lists(st.integers(1, 7), min_size=12, max_size=12))
@example([1]*12)
@example([1, 7]*6)
@example([1]*9+[7]*3)
@example([7]*3+[2]*9)
def test_whatever_rows_end_when_the_others_go_on_as_if_alone(tokenizer, lengths):
    model, extended, extend = make_model(), [], GPT.extend
    def counted(self, ids, prefix, cache=None, counts=None):
        extended.append((len(ids), len(prefix.lengths)))
        return extend(self, ids, prefix, cache, counts)
    with mock.patch.object(sampling, 'draw', ends_at(lengths)), mock.patch.object(GPT, 'extend', counted):
        r = sample(model, tokenizer, PROMPTS, 3, 10, 1., seeded())
    assert r.completion_mask.sum(1).tolist() == lengths and r.completion_ids.shape[1] == max(lengths)
    alive = [[i for i, n in enumerate(lengths) if n > t] for t in range(1, max(lengths))]
    said = [{(i//3, *r.completion_ids[i, :t].tolist()) for i in rows} for t, rows in enumerate(alive, 1)]
    assert [n for n, _ in extended] == [len(texts) for texts in said]    # rows that agree are computed once
    assert all(0.75*stored < len({i//3 for i in rows}) for (_, stored), rows in zip(extended, alive))  # prompts too
    assert all(r.completion_ids[row, n-1] == END and (r.texts[row] == '') == (n == 1) for row, n in enumerate(lengths))
    with torch.no_grad():
        logits = model(*(torch.cat([prompt.repeat_interleave(3, 0), done], 1) for prompt, done in
                         ((r.prompt_ids, r.completion_ids), (r.prompt_mask, r.completion_mask))))
    full = logits[:, r.prompt_ids.shape[1]-1:-1].log_softmax(-1).gather(2, r.completion_ids[..., None])[..., 0]
    assert_close(r.logprobs, full*r.completion_mask, atol=1e-5, rtol=0)


def test_texts_are_cut_before_the_end_token(model, tokenizer):
    r = sample(model, tokenizer, PROMPTS, 6, 20, 1., seeded())
    for text, ids, mask in zip(r.texts, r.completion_ids, r.completion_mask):
        kept = ids[mask].tolist()
        if kept[-1] == END: kept = kept[:-1]
        assert text.split() == [WORDS[i] for i in kept] and WORDS[END] not in text


# ---------------------------------------------------------------- the distribution, and noise

@pytest.mark.parametrize('temperature', [0.6, 1., 2.])
def test_frequencies_match_the_reported_probabilities(tokenizer, temperature):
    model, n = make_model(sharpness=3.), 6000
    r = sample(model, tokenizer, ['a b c'], n, 1, temperature, seeded(5))
    with torch.no_grad(): probs = (model(r.prompt_ids)[0, -1]/temperature).softmax(-1)
    counts = torch.bincount(r.completion_ids[:, 0], minlength=len(WORDS)).double()
    assert_close(r.logprobs[:, 0].exp(), probs[r.completion_ids[:, 0]], atol=1e-6, rtol=1e-5)
    often = probs*n >= 5
    expected = torch.cat([probs[often], probs[~often].sum()[None]]).double()*n
    seen = torch.cat([counts[often], counts[~often].sum()[None]])
    chi2, dof = ((seen-expected)**2/expected.clamp(min=1e-9)).sum(), int(often.sum())
    assert dof >= 5 and chi2 < dof+4*(2*dof)**0.5, f'chi2 {chi2:.1f} with {dof} degrees of freedom'


def test_second_tokens_are_distributed_given_the_first(tokenizer):
    model, n = make_model(sharpness=3.), 4000
    r = sample(model, tokenizer, ['a b c'], n, 2, 1., seeded(6))
    first = r.completion_ids[:, 0].bincount(minlength=len(WORDS))[1:].argmax()+1
    rows = r.completion_ids[:, 0] == first
    with torch.no_grad():
        probs = model(torch.cat([r.prompt_ids[0], first[None]])[None])[0, -1].softmax(-1).double()
    expected = probs*int(rows.sum())
    seen = torch.bincount(r.completion_ids[rows, 1], minlength=len(WORDS)).double()
    often = expected >= 5
    chi2, dof = ((seen-expected)[often]**2/expected[often]).sum(), int(often.sum())-1
    assert dof >= 5 and chi2 < dof+4*(2*dof)**0.5


@settings(max_examples=200)
@given(st.lists(st.sampled_from([float('-inf'), -200., -3., 0., 1., 4.]), min_size=1, max_size=9)
       .filter(lambda z: max(z) > -100),
       st.sampled_from([0., 0.25, 0.5, 1-2**-24]), st.sampled_from([0., 0.5, 1.]))
def test_a_token_of_probability_zero_is_never_drawn(logits, noise, temperature):
    ids, logprobs = draw(torch.tensor([logits]), temperature, torch.tensor([noise]))
    assert logprobs.isfinite().all() and logits[int(ids)] > -100


def test_same_seed_same_rollouts_other_seed_others(model, tokenizer):
    a, b, c = (sample(model, tokenizer, PROMPTS, 4, 16, 1., seeded(s)) for s in (0, 0, 1))
    for f in dataclasses.fields(a):
        x, y = getattr(a, f.name), getattr(b, f.name)
        assert x.equal(y) if isinstance(x, torch.Tensor) else x == y
    assert a.texts != c.texts
    torch.manual_seed(11); d = sample(model, tokenizer, PROMPTS, 4, 16, 1.)
    torch.manual_seed(11); e = sample(model, tokenizer, PROMPTS, 4, 16, 1.)
    assert d.texts == e.texts


def test_the_end_of_one_row_does_not_change_the_others(model, tokenizer, monkeypatch):
    real, calls = sampling.draw, [0]
    before = sample(model, tokenizer, PROMPTS, 4, 16, 1., seeded())
    def rigged(logits, temperature, noise):
        ids, logprobs = real(logits, temperature, noise)
        if calls[0] == 2: ids[0] = END
        calls[0] += 1
        return ids, logprobs
    monkeypatch.setattr(sampling, 'draw', rigged)
    after = sample(model, tokenizer, PROMPTS, 4, 16, 1., seeded())
    changed = int((before.completion_mask.sum(1) > 2).nonzero()[0])
    assert before.texts[changed] != after.texts[changed] or int(before.completion_mask[changed].sum()) == 3
    for row in range(16):
        if row != changed:
            assert before.texts[row] == after.texts[row]
            n = int(before.completion_mask[row].sum())
            assert_close(before.logprobs[row, :n], after.logprobs[row, :n], atol=1e-5, rtol=0)


def test_a_higher_limit_only_appends(model, tokenizer):
    short, long = (sample(model, tokenizer, PROMPTS, 4, n, 1., seeded()) for n in (5, 20))
    for a, b in zip(short.texts, long.texts): assert b.startswith(a)


def test_the_generator_advances_by_a_known_amount(model, tokenizer):
    g, h = seeded(), seeded()
    sample(model, tokenizer, PROMPTS, 4, 16, 1., g)
    torch.rand(16, 16, generator=h)
    assert g.get_state().equal(h.get_state())


# ---------------------------------------------------------------- gradients

def test_gradients_equal_those_of_a_full_forward(tokenizer):
    model = make_model().double()
    r = sample(model, tokenizer, PROMPTS, 3, 14, 0.8, seeded())
    weights = torch.randn(r.logprobs.shape, generator=seeded(2))
    logprobs, entropy = completion_logprobs(model, r.prompt_ids, r.prompt_mask, r.completion_ids, r.completion_mask, 3,
                                            0.8)
    (weights*logprobs + 0.3*entropy).sum().backward()
    got = {n: p.grad.clone() for n, p in model.named_parameters()}
    model.zero_grad()
    loss = 0.
    for row in range(12):
        one, every = full_logprobs(model, r, row)
        n = len(one)
        loss = loss + (weights[row, :n]*one).sum() - 0.3*(every.exp()*every).sum()
    loss.backward()
    for name, p in model.named_parameters():
        assert_close(got[name], p.grad, atol=2e-5, rtol=1e-4, msg=lambda m, name=name: f'{name}: {m}')


@pytest.mark.parametrize('with_entropy', [True, False])
def test_tiles_change_neither_values_nor_gradients(model, tokenizer, with_entropy, monkeypatch):
    r, results, scored = sample(model, tokenizer, PROMPTS, 3, 14, 0.8, seeded()), [], []
    monkeypatch.setattr(GPT, 'logits', lambda self, hidden, logits=GPT.logits: scored.append(len(hidden)) or logits(self, hidden))
    for tile_elements in (2**24, 7*len(WORDS), 1):
        monkeypatch.setattr('rookworld_nb.sampling.TILE_ELEMENTS', tile_elements)
        model.zero_grad()
        scored.clear()
        logprobs, entropy = completion_logprobs(model, r.prompt_ids, r.prompt_mask, r.completion_ids, r.completion_mask, 3,
                                                0.8, with_entropy)
        ((logprobs**2).sum() + (entropy.sum() if with_entropy else 0)).backward()
        assert (entropy is not None) == with_entropy
        assert sum(scored) == int(r.completion_mask.sum())*(1 if tile_elements == 2**24 else 2)    # tiles keep nothing for backward
        results.append([logprobs.detach(), *(p.grad.clone() for p in model.parameters())])
    model.zero_grad()
    for other in results[1:]:
        for a, b in zip(results[0], other): assert_close(a, b, atol=1e-5, rtol=1e-4)


def test_sampled_logprobs_can_enter_an_autograd_graph(model, tokenizer):
    r = sample(model, tokenizer, PROMPTS, 2, 8, 1., seeded())
    logprobs, _ = completion_logprobs(model, r.prompt_ids, r.prompt_mask, r.completion_ids, r.completion_mask, 2, 1.)
    ((logprobs-r.logprobs).exp()*r.logprobs).sum().backward()
    model.zero_grad()
    assert not r.logprobs.requires_grad and not r.logprobs.is_inference()


# ---------------------------------------------------------------- ragged completions

@settings(max_examples=100)
@given(st.lists(st.integers(0, 150), min_size=1, max_size=40))
def test_buckets_are_a_partition_of_like_lengths(lengths):
    buckets = length_buckets(torch.tensor(lengths))
    assert sorted(torch.cat(buckets).tolist()) == list(range(len(lengths)))
    for bucket in buckets:
        inside = torch.tensor(lengths)[bucket]
        assert len(bucket) and inside.max() <= 1.5*max(int(inside.min()), 8)


def test_short_completions_share_a_bucket():
    assert [bucket.tolist() for bucket in length_buckets(torch.tensor([12, 0, 3, 13, 1, 19]))] == [[0, 1, 2, 4], [3, 5]]


@settings(max_examples=30)
@given(st.lists(st.integers(0, 20), min_size=6, max_size=6), st.integers(0, 1000))
def test_hidden_states_come_in_row_order_whatever_the_lengths(lengths, seed):
    model, g = make_model(), seeded(seed)
    prompts, ids = torch.randint(1, 24, (3, 6), generator=g), torch.randint(1, 24, (6, 20), generator=g)
    mask = torch.arange(20) < torch.tensor(lengths)[:, None]
    with torch.no_grad():
        got = completion_hidden(model, prompts, torch.ones(3, 6, dtype=torch.bool), ids, mask, 2)
        full = model.hidden(torch.cat([prompts.repeat_interleave(2, 0), ids], 1))[:, 5:-1]
    assert_close(got, full[mask], atol=2e-5, rtol=1e-4)


@settings(max_examples=30)
@given(st.lists(st.integers(0, 3), min_size=12, max_size=12), st.integers(0, 1000))
def test_equal_completions_are_computed_once_and_their_gradients_add_up(chosen, seed):
    model, g, computed = make_model().double(), seeded(seed), []
    prompts = torch.randint(1, 24, (3, 6), generator=g)
    prompt_mask, lengths = torch.ones(3, 6, dtype=torch.bool), torch.tensor([2, 4, 9, 9])[chosen]
    ids = torch.randint(1, 24, (4, 9), generator=g)[chosen]
    mask = torch.arange(9) < lengths[:, None]
    ids[~mask], weights = END, torch.rand(int(mask.sum()), 16, generator=g, dtype=torch.float64)    # each copy has its own
    counter = model.h[0].register_forward_hook(lambda block, args, out: computed.append(out.shape[:2]))
    got = completion_hidden(model, prompts, prompt_mask, ids, mask, 4)
    counter.remove()
    full = model.hidden(torch.cat([prompts.repeat_interleave(4, 0), ids], 1))[:, 5:-1][mask]
    assert_close(got, full)
    gradients = [torch.autograd.grad((weights*hidden).sum(), model.wpe.weight)[0] for hidden in (got, full)]
    assert_close(*gradients)
    assert [rows for rows, _ in computed] == [3, len({(i//4, choice) for i, choice in enumerate(chosen)})]


# ---------------------------------------------------------------- refusals

def test_numbers_of_numpy_are_numbers(model, tokenizer):
    asked = (sample(model, tokenizer, ['a'], kind(2), kind(4), 1., seeded()) for kind in (int, np.int64))
    assert next(asked).texts == next(asked).texts


@pytest.mark.parametrize('change, names', [
    (dict(prompts=[]), 'prompts is empty'),
    (dict(prompts='a b'), "not the text 'a b'"),
    (dict(prompts=['a', '']), "prompt '' has no tokens"),
    (dict(group_size=0), 'group_size=0'),
    (dict(max_new_tokens=0), 'max_new_tokens=0'),
    (dict(group_size=2.5), 'group_size=2.5'),
    (dict(max_new_tokens=4.), 'max_new_tokens=4.0'),
    (dict(group_size=True), 'group_size=True'),
    (dict(temperature='0.7'), "temperature='0.7'"),
    (dict(temperature=None), 'temperature=None'),
    (dict(temperature=-0.1), 'temperature=-0.1'),
    (dict(temperature=float('nan')), 'temperature=nan'),
    (dict(temperature=float('inf')), 'temperature=inf'),
    (dict(temperature=1e-40), 'temperature=1e-40'),
    (dict(prompts=['a', ' '.join(['b']*64)]), '64 tokens; the model has n_positions=64'),
])
def test_bad_requests_are_refused_before_any_work(model, tokenizer, monkeypatch, change, names):
    def no_work(*_, **__): raise AssertionError('the model was used')
    monkeypatch.setattr(GPT, 'prefill', no_work)
    request = dict(prompts=['a'], group_size=2, max_new_tokens=4, temperature=1.) | change
    with pytest.raises(SamplingError) as error: sample(model, tokenizer, **request)
    assert names in str(error.value)
    assert isinstance(error.value, ValueError)


def test_a_model_that_computes_nan_is_said(model, tokenizer):
    broken = copy.deepcopy(model)
    broken.ln_f.weight.data[0] = float('nan')
    with pytest.raises(SamplingError, match='NaN or infinity'): sample(broken, tokenizer, ['a b'], 2, 4, 1., seeded())


def test_many_rows_of_half_precision_are_no_overflow():
    half, tokenizer = load_pretrained('nano', dtype=torch.float16)
    prompts = ['P: rnbqkbnr/pppppppp/8/8/8/8/PPPPPPPP/RNBQKBNR w KQkq - 0 1']
    assert sample(half, tokenizer, prompts, 64, 2, 1., seeded()).logprobs.isfinite().all()


@pytest.mark.parametrize('temperature', [0., 1.])
def test_nan_that_comes_later_is_said(model, tokenizer, temperature):
    broken = copy.deepcopy(model)
    broken.wpe.weight.data[4] = float('nan')
    with pytest.raises(SamplingError, match='NaN or infinity at new token 4'):
        sample(broken, tokenizer, ['a b'], 8, 8, temperature, seeded())


def test_a_tokenizer_that_cuts_prompts_is_refused(model, tokenizer):
    cutting = Tokenizer.from_str(tokenizer.to_str())
    cutting.enable_truncation(3)
    assert sample(model, cutting, ['a b c'], 1, 1, 1., seeded()).prompt_ids.shape == (1, 3)
    with pytest.raises(PromptLengthError, match='no_truncation'): sample(model, cutting, ['a b c d'], 1, 1, 1.)


def test_a_long_prompt_leaves_less_room(model, tokenizer):
    r = sample(model, tokenizer, ['a', ' '.join(['b']*61)], 8, 50, 1., seeded())
    assert r.completion_ids.shape[1] <= 3
    with torch.no_grad():
        for row in range(16):
            n = int(r.completion_mask[row].sum())
            assert_close(r.logprobs[row, :n], full_logprobs(model, r, row)[0], atol=1e-5, rtol=0)
    with pytest.raises(PromptLengthError): sample(model, tokenizer, [' '.join(['b']*65)], 1, 1, 1.)


def test_rollouts_move_between_devices(model, tokenizer):
    r = sample(model, tokenizer, PROMPTS, 2, 4, 1., seeded())
    moved = r.to('meta')
    tensors = [f.name for f in dataclasses.fields(r) if isinstance(getattr(r, f.name), torch.Tensor)]
    assert len(tensors) == 5 and all(getattr(moved, n).device.type == 'meta' for n in tensors)
    assert moved.texts == r.texts and moved.group_size == 2 and r.logprobs.device.type == 'cpu'


class Conversions(TorchDispatchMode):
    "Counts how often a matrix of a model's weights is made one of bfloat16."
    def __init__(self, model):
        super().__init__()
        self.count, self.weights = 0, {p.data_ptr() for p in model.parameters() if p.dim() == 2}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function is torch.ops.aten._to_copy.default and args[0].data_ptr() in self.weights and kwargs.get('dtype') == torch.bfloat16: self.count += 1
        return function(*args, **(kwargs or {}))


def test_in_bfloat16_each_weight_is_converted_once(model, tokenizer):
    model = copy.deepcopy(model)
    model.bf16 = True
    with Conversions(model) as conversions: rollouts = sample(model, tokenizer, PROMPTS, 2, 8, 1., seeded())
    assert rollouts.completion_ids.shape[1] > 2 and conversions.count == 4*model.cfg.n_layer
    assert not torch.is_autocast_enabled('cpu') and rollouts.logprobs.dtype == torch.float32


@pytest.mark.parametrize('temperature', [0, 1.])
def test_a_vocabulary_with_nan_is_refused(temperature):
    model, tokenizer = load_pretrained('nano')
    with torch.no_grad(): model.wte.weight[5] = math.nan
    with pytest.raises(SamplingError, match='NaN or infinity'): sample(model, tokenizer, ['P: 8/8/8/8/8/8/8/8 w - - 0 1'], 2, 4, temperature)


def test_nothing_sampled_has_no_hidden_states():
    model, tokenizer = load_pretrained('nano')
    none = sample(model, tokenizer, ['P: a', 'P: b'], 3, 4, 1., share=slice(0, 0))
    assert completion_logprobs(model, none.prompt_ids, none.prompt_mask, none.completion_ids, none.completion_mask, 3, 1.)[0].shape == (0, 0)


def test_rows_that_do_not_match_the_prompts_are_refused(model, tokenizer):
    r = sample(model, tokenizer, ['a b', 'c'], 2, 3, 1., torch.Generator().manual_seed(0))
    for ids, mask, group_size in ((r.completion_ids, r.completion_mask, 4), (r.completion_ids, r.completion_mask[:, :-1], 2)):
        with pytest.raises(SamplingError, match='as many rows as their product'):
            completion_logprobs(model, r.prompt_ids, r.prompt_mask, ids, mask, group_size, 1.)
    whole = completion_logprobs(model, r.prompt_ids, r.prompt_mask, r.completion_ids, r.completion_mask, 2, 1.)[0]
    assert_close(completion_logprobs(model, r.prompt_ids, r.prompt_mask, r.completion_ids, r.completion_mask.int(), 2, 1.)[0], whole)


def test_long_prompts_and_long_completions_of_other_rows_share_a_batch():
    model = make_model(n_positions=8)
    prompts = torch.tensor([[1, 3, 4, 5, 6, 7], [0, 0, 0, 0, 0, 1]])
    ids, mask = torch.tensor([[4, 0, 0, 0, 0, 0], [4, 5, 6, 7, 8, 0]]), torch.tensor([[1, 1, 0, 0, 0, 0], [1]*6]).bool()
    for width, row in itertools.product((6, 4), range(2)):    # 4: by one position too many
        part, ids, mask = slice(row, row + 1), ids[:, :width], mask[:, :width]
        found = completion_logprobs(model, prompts, prompts > 0, ids, mask, 1, 1.)[0]
        assert_close(found[part], completion_logprobs(model, prompts[part], prompts[part] > 0, ids[part], mask[part], 1, 1.)[0])


def test_a_tokenizer_of_a_larger_model_is_refused(tokenizer):
    small = GPT(GPTConfig(n_layer=1, n_head=1, n_embd=8, vocab_size=13, n_positions=64))
    with pytest.raises(SamplingError, match='has id 22, the model a vocab_size of 13'): sample(small, tokenizer, ['v'], 1, 2, 0.)


def test_the_default_type_is_of_no_concern(model, tokenizer):
    before = sample(model, tokenizer, ['a b'], 2, 3, 1., torch.Generator().manual_seed(0))
    torch.set_default_dtype(torch.float64)
    try: after = sample(model, tokenizer, ['a b'], 2, 3, 1., torch.Generator().manual_seed(0))
    finally: torch.set_default_dtype(torch.float32)
    assert torch.equal(before.completion_ids, after.completion_ids) and torch.equal(before.logprobs, after.logprobs)


def test_the_end_token_may_have_any_id(model):
    ended = 0
    for end in range(1, len(WORDS)):
        names = [*WORDS]
        names[0], names[end] = names[end], names[0]
        other = Tokenizer(models.WordLevel({word: i for i, word in enumerate(names)}, unk_token=WORDS[END]))
        other.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        r = sample(model, other, PROMPTS, 4, 12, 1., seeded())
        is_end = (r.completion_ids == end).long()
        assert r.completion_mask.equal(is_end.cumsum(1) - is_end == 0)    # up to and including the first; behind it nothing else
        wanted = [[names[i] for i in row[real].tolist() if i != end] for row, real in zip(r.completion_ids, r.completion_mask)]
        assert [text.split() for text in r.texts] == wanted
        ended += int((r.completion_ids[:, 0] == end).sum())
    assert ended
