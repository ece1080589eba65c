"""GPT-2 against transformers, and the properties that sampling and training build on."""
import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rookworld_nb import model as model_module
from rookworld_nb.model import CACHE_BLOCK, GPT, GPTConfig, KVCache, ModelConfigError, SequenceError, attend_after, attend_repeated, causal_bias, pad_vocabulary
from torch.testing import assert_close
from transformers import GPT2Config, GPT2LMHeadModel
from transformers.pytorch_utils import Conv1D

SIZES = {'tiny': GPTConfig(1, 1, 8, 11, 16), 'odd': GPTConfig(3, 3, 21, 37, 40), 'nano': GPTConfig(6, 5, 160, 300, 256),
         'wide': GPTConfig(2, 12, 192, 1000, 64)}


def hf_twin(model: GPT) -> GPT2LMHeadModel:
    """The same weights in transformers' GPT-2; written without the package's own loader."""
    cfg = model.cfg
    hf = GPT2LMHeadModel(GPT2Config(**vars(cfg), attn_pdrop=0., embd_pdrop=0., resid_pdrop=0., bos_token_id=0, eos_token_id=0,
                                    attn_implementation='eager')).to(model.wte.weight.dtype)
    ours = dict(model.named_parameters())
    conv = {f'{name}.weight' for name, module in hf.transformer.named_modules() if isinstance(module, Conv1D)}
    with torch.no_grad():
        theirs = dict(hf.transformer.named_parameters())
        assert ours.keys() == theirs.keys()
        for name, p in theirs.items():
            p.copy_(ours[name].T if name in conv else ours[name])
    return hf


def noisy(cfg: GPTConfig, dtype: torch.dtype = torch.float32) -> GPT:
    """A model in which every parameter matters: biases and norms are moved off 0 and 1, and attention is not uniform."""
    model = GPT(cfg)
    with torch.no_grad():
        for p in model.parameters():
            p += 0.1*torch.randn_like(p)
    return model.to(dtype)


def random_mask(n_rows: int, n_tokens: int, side: str) -> torch.Tensor:
    """Rows of random length, at least one token each, padded on one side."""
    lengths = torch.randint(1, n_tokens+1, (n_rows, 1))
    right = torch.arange(n_tokens) < lengths
    return right if side == 'right' else right.flip(1)


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


# ---- parity with transformers

@pytest.mark.parametrize('cfg', SIZES.values(), ids=SIZES)
def test_logits_equal_transformers(cfg):
    model = noisy(cfg)
    hf = hf_twin(model)
    for n_tokens in (1, 2, cfg.n_positions):
        ids = torch.randint(0, cfg.vocab_size, (3, n_tokens))
        with torch.no_grad():
            assert_close(model(ids), hf(ids).logits, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize('side', ['left', 'right'])
@pytest.mark.parametrize('cfg', SIZES.values(), ids=SIZES)
def test_padded_logits_equal_transformers(cfg, side):
    model = noisy(cfg)
    hf = hf_twin(model)
    ids = torch.randint(0, cfg.vocab_size, (5, 12))
    mask = random_mask(5, 12, side)
    positions = (mask.long().cumsum(1)-1).clamp(min=0)
    with torch.no_grad():
        expected = hf(ids, attention_mask=mask.long(), position_ids=positions).logits
        for given_mask in (mask, mask.long(), mask.float()):
            assert_close(model(ids, given_mask)[mask], expected[mask], atol=1e-4, rtol=1e-4)


def test_gradients_equal_transformers():
    model = noisy(SIZES['odd'], torch.float64)
    hf = hf_twin(model)
    ids = torch.randint(0, 37, (4, 15))
    mask = random_mask(4, 15, 'left')
    weights = torch.randn(4, 15, 37, dtype=torch.float64)*mask[..., None]
    positions = (mask.long().cumsum(1)-1).clamp(min=0)
    (model(ids, mask).log_softmax(-1)*weights).sum().backward()
    (hf(ids, attention_mask=mask.long(), position_ids=positions).logits.log_softmax(-1)*weights).sum().backward()
    theirs = dict(hf.transformer.named_parameters())
    for name, p in model.named_parameters():
        expected = theirs[name].grad
        assert_close(p.grad, expected if p.shape == expected.shape and not name.endswith(
            ('c_attn.weight', 'c_proj.weight', 'c_fc.weight')) else expected.T, atol=1e-10, rtol=1e-8, msg=lambda m, n=name: f'{n}: {m}')


@pytest.mark.parametrize('side', ['left', 'right'])
def test_greedy_decoding_equals_transformers_generate(side):
    model = noisy(SIZES['odd'])
    hf = hf_twin(model)
    ids = torch.randint(1, 37, (6, 9))
    mask = random_mask(6, 9, side)
    ids[~mask] = 0
    expected = torch.stack([hf.generate(row[m][None], attention_mask=torch.ones(1, int(m.sum())), max_new_tokens=20, do_sample=False,
                                        eos_token_id=None, pad_token_id=0)[0, int(m.sum()):] for row, m in zip(ids, mask)])
    with torch.no_grad():
        prefix, cache = model.prefill(ids, mask), KVCache()
        tokens = [model.logits(prefix.last_hidden).argmax(-1)]
        for _ in range(19):
            tokens.append(model.logits(model.extend(tokens[-1][:, None], prefix, cache)[:, 0]).argmax(-1))
    assert torch.stack(tokens, 1).tolist() == expected.tolist()


@pytest.mark.parametrize('cfg', [GPTConfig(), SIZES['odd']], ids=['124M', 'odd'])
def test_parameters_equal_transformers(cfg):
    with torch.device('meta'):
        ours = {name: p.numel() for name, p in GPT(cfg).named_parameters()}
        theirs = {name: p.numel() for name, p in GPT2LMHeadModel(GPT2Config(**vars(cfg))).transformer.named_parameters()}
    assert ours == theirs


def test_initialisation_has_the_spread_of_gpt2():
    model = GPT(GPTConfig(8, 4, 128, 500, 100))
    std = {name: p.std().item() for name, p in model.named_parameters() if p.dim() == 2}
    for name, value in std.items():
        wanted = 0.01 if name == 'wpe.weight' else 0.02/4 if name.endswith('c_proj.weight') else 0.02
        assert value == pytest.approx(wanted, rel=0.05), name
    assert all(p.abs().max() == 0 for name, p in model.named_parameters() if name.endswith('bias'))
    assert all(bool((p == 1).all()) for name, p in model.named_parameters() if 'ln_' in name and name.endswith('weight'))


# ---- reading

@pytest.mark.parametrize('side', ['left', 'right'])
def test_a_row_is_the_same_alone_and_in_a_batch(side):
    model = noisy(SIZES['odd'])
    ids, mask = torch.randint(0, 37, (6, 14)), random_mask(6, 14, side)
    with torch.no_grad():
        batch = model(ids, mask)
        for i in range(6):
            assert_close(batch[i][mask[i]], model(ids[i][mask[i]][None])[0], atol=1e-5, rtol=1e-5)


def test_padding_ids_do_not_matter_and_everything_is_finite():
    model = noisy(SIZES['odd'])
    ids, mask = torch.randint(0, 37, (6, 14)), random_mask(6, 14, 'left')
    other = torch.where(mask, ids, 36-ids)
    first, second = model(ids, mask), model(other, mask)
    assert first.isfinite().all()
    assert_close(first[mask], second[mask], atol=0, rtol=0)
    first[mask].sum().backward()
    assert all(p.grad.isfinite().all() for p in model.parameters())


def test_the_future_does_not_leak():
    model = noisy(SIZES['odd'])
    ids = torch.randint(0, 37, (2, 10))
    changed = ids.clone()
    changed[:, 6:] = 36-changed[:, 6:]
    assert_close(model(ids)[:, :6], model(changed)[:, :6], atol=1e-6, rtol=0)
    assert (model(ids)[:, 6:]-model(changed)[:, 6:]).abs().max() > 1e-2


def test_a_mask_of_ones_is_no_mask():
    model, ids = noisy(SIZES['odd']), torch.randint(0, 37, (3, 10))
    assert torch.equal(model(ids, torch.ones_like(ids)), model(ids))


def test_train_and_eval_mode_are_the_same():
    model, ids = noisy(SIZES['odd']), torch.randint(0, 37, (3, 10))
    assert torch.equal(model.train()(ids), model.eval()(ids))


# ---- prefill and extend

def grouped_case(model: GPT, B: int, G: int, Tp: int, T: int, side: str):
    """Prompts, continuations, and the hidden states of the continuations from whole texts with the prompt repeated."""
    V = model.cfg.vocab_size
    prompts, mask, new = torch.randint(0, V, (B, Tp)), random_mask(B, Tp, side), torch.randint(0, V, (B*G, T))
    whole = torch.cat([prompts.repeat_interleave(G, 0), new], 1)
    whole_mask = torch.cat([mask.repeat_interleave(G, 0), torch.ones(B*G, T, dtype=torch.bool)], 1)
    return prompts, mask, new, model.hidden(whole, whole_mask)[:, Tp:]


@settings(max_examples=25)
@given(B=st.integers(1, 4), G=st.integers(1, 4), Tp=st.integers(1, 8), T=st.integers(1, 6), side=st.sampled_from(['left', 'right']),
       seed=st.integers(0, 10**6))
def test_extension_equals_whole_texts(B, G, Tp, T, side, seed):
    torch.manual_seed(seed)
    model = noisy(GPTConfig(2, 2, 16, 50, 16), torch.float64)
    prompts, mask, new, expected = grouped_case(model, B, G, Tp, T, side)
    prefix = model.prefill(prompts, mask)
    assert prefix.lengths.tolist() == mask.sum(1).tolist()
    assert_close(model.extend(new, prefix), expected)


@settings(max_examples=25)
@given(B=st.integers(1, 4), G=st.integers(1, 4), Tp=st.integers(1, 6), side=st.sampled_from(['left', 'right']), data=st.data())
def test_cached_steps_equal_whole_texts_while_rows_leave(B, G, Tp, side, data):
    torch.manual_seed(data.draw(st.integers(0, 10**6)))
    model = noisy(GPTConfig(2, 2, 16, 50, 16), torch.float64)
    prompts, mask, new, expected = grouped_case(model, B, G, Tp, 6, side)
    rows, done = torch.arange(B*G), 0
    with torch.no_grad():
        prefix, cache = model.prefill(prompts, mask), KVCache()
        while done < 6 and len(rows):
            step = data.draw(st.integers(1, 6-done))
            out = model.extend(new[rows, done:done+step], prefix, cache, (rows//G).bincount(minlength=B).tolist())
            assert_close(out, expected[rows, done:done+step])
            done += step
            keep = torch.tensor(data.draw(st.lists(st.booleans(), min_size=len(rows), max_size=len(rows))))
            cache.select(keep.nonzero().squeeze(1))
            rows = rows[keep]


def test_rows_may_leave_before_the_first_step():
    model = noisy(SIZES['odd'], torch.float64)
    prompts, mask, new, expected = grouped_case(model, 3, 2, 5, 2, 'left')
    keep = torch.tensor([True, False, False, False, True, True])
    with torch.no_grad():
        with pytest.raises(SequenceError, match='indices .int64., not torch.bool'): KVCache().select(keep)
        for cache in (KVCache(), None):
            assert_close(model.extend(new[keep], model.prefill(prompts, mask), cache, [1, 0, 2]), expected[keep])


def test_rows_may_leave_twice():
    model = noisy(SIZES['odd'], torch.float64)
    prompts, mask, new, expected = grouped_case(model, 3, 2, 5, 3, 'left')
    rows = torch.arange(6)
    with torch.no_grad():
        prefix, cache = model.prefill(prompts, mask), KVCache()
        for t, kept in enumerate(([1, 3, 4, 5], [1, 3], [1])):
            assert_close(model.extend(new[rows, t:t+1], prefix, cache, (rows//2).bincount(minlength=3).tolist()), expected[rows, t:t+1])
            cache.select(torch.tensor(kept))
            rows = rows[kept]
        assert rows.tolist() == [5] and len(cache.keys[0]) == 1


def test_a_row_may_go_on_in_several_ways():
    model = noisy(SIZES['odd'], torch.float64)
    prompts, mask, new, expected = grouped_case(model, 2, 3, 5, 3, 'left')
    new[:3, :2] = new[:1, :2]    # the samples of prompt 0 agree for two tokens
    whole = model.hidden(torch.cat([prompts.repeat_interleave(3, 0), new], 1), torch.cat([mask.repeat_interleave(3, 0), torch.ones(6, 3).bool()], 1))[:, 5:]
    with torch.no_grad():
        prefix, cache, once = model.prefill(prompts, mask), KVCache(), torch.tensor([0, 3, 4, 5])
        assert_close(model.extend(new[once, :2], prefix, cache, [1, 3]), whole[once, :2])
        cache.select(torch.tensor([0, 0, 0, 1, 2, 3]))
        assert_close(model.extend(new[:, 2:], prefix, cache), whole[:, 2:])


def test_the_last_hidden_state_is_that_of_the_last_real_token():
    model = noisy(SIZES['odd'])
    for side in ('left', 'right'):
        ids, mask = torch.randint(0, 37, (5, 8)), random_mask(5, 8, side)
        expected = torch.stack([model.hidden(row[m][None])[0, -1] for row, m in zip(ids, mask)])
        assert_close(model.prefill(ids, mask).last_hidden, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize('checkpointing', [False, True])
def test_shared_prompts_have_the_gradients_of_repeated_ones(checkpointing):
    model = noisy(SIZES['odd'], torch.float64)
    prompts, mask, new, expected = grouped_case(model, 3, 4, 6, 5, 'left')
    weights = torch.randn_like(expected)
    (expected*weights).sum().backward()
    wanted = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    model.gradient_checkpointing = checkpointing
    (model.extend(new, model.prefill(prompts, mask))*weights).sum().backward()
    for p, grad in zip(model.parameters(), wanted):
        assert_close(p.grad, grad, atol=1e-11, rtol=1e-9)


def test_gradient_checkpointing_stores_less_and_changes_nothing():
    model, ids = noisy(SIZES['nano']), torch.randint(0, 300, (4, 32))
    kept, grads = [], []
    for model.gradient_checkpointing in (False, True):
        stored = 0

        def pack(t):
            nonlocal stored
            stored += t.numel()
            return t
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            loss = model(ids).square().mean()
        kept.append(stored)
        model.zero_grad()
        loss.backward()
        grads.append([p.grad.clone() for p in model.parameters()])
    assert kept[1] < kept[0]/3
    assert_close(grads[0], grads[1], atol=0, rtol=0)


def test_recomputing_a_block_remembers_nothing_twice(monkeypatch):
    model, made = noisy(SIZES['nano']), []
    model.gradient_checkpointing = True
    real = model_module.make_prefix
    monkeypatch.setattr(model_module, 'make_prefix', lambda hidden, mask, memory: (made.append(memory), real(hidden, mask, memory))[1])
    model.prefill(torch.randint(0, 300, (2, 8))).last_hidden.sum().backward()
    assert len(made[0]) == model.cfg.n_layer


def test_prompts_are_stored_once_however_many_samples():
    model = noisy(SIZES['odd'])
    prefix = model.prefill(torch.randint(0, 37, (2, 6)))
    before = [k.data_ptr() for k in prefix.keys]
    with torch.no_grad():
        model.extend(torch.randint(0, 37, (16, 1)), prefix, KVCache())
    assert [tuple(k.shape) for k in prefix.keys] == [(2, 3, 6, 7)]*3 and before == [k.data_ptr() for k in prefix.keys]


def test_the_cache_grows_by_whole_blocks_and_holds_no_graph():
    model = noisy(SIZES['wide'])
    prefix, cache = model.prefill(torch.randint(0, 37, (2, 6))), KVCache()
    for length in range(1, 2*CACHE_BLOCK + 2):
        model.extend(torch.randint(0, 37, (4, 1)), prefix, cache)
        stored = cache.keys + cache.values
        assert cache.length == length and {x.shape[2] for x in stored} == {CACHE_BLOCK*-(-length//CACHE_BLOCK)}
        assert all(x.is_contiguous() and not x.requires_grad for x in stored)
    cache.select(torch.tensor([0, 3]))
    model.extend(torch.randint(0, 37, (2, 1)), prefix, cache)
    assert all(x.is_contiguous() and len(x) == 2 for x in cache.keys + cache.values)


def test_what_a_cache_has_not_filled_is_never_seen():
    model = noisy(SIZES['odd'], torch.float64)
    prefix, new = model.prefill(torch.randint(0, 37, (2, 6))), torch.randint(0, 37, (4, 5))
    clean, dirty = KVCache(), KVCache()
    with torch.no_grad():
        for cache in (clean, dirty): model.extend(new[:, :2], prefix, cache)
        for x in dirty.keys: x[:, :, 2:] = 1e3
        for x in dirty.values: x[:, :, 2:] = 1e3
        for step in (new[:, 2:3], new[:, 3:]):
            assert_close(model.extend(step, prefix, dirty), model.extend(step, prefix, clean), atol=0, rtol=0)


# ---- kinds of numbers, modes and copies

@pytest.mark.parametrize(('dtype', 'tolerance'), [(torch.float64, 1e-4), (torch.bfloat16, 0.15), (torch.float16, 0.03)], ids=str)
def test_other_kinds_of_numbers(dtype, tolerance):
    reference = GPT(SIZES['odd'])
    model = copy.deepcopy(reference).to(dtype)
    ids, mask, new = torch.randint(0, 37, (3, 6)), random_mask(3, 6, 'left'), torch.randint(0, 37, (6, 4))
    with torch.no_grad():
        for net in (model, reference):
            net.cached = net.extend(new, net.prefill(ids, mask), KVCache())
        assert model(ids, mask).dtype == model.cached.dtype == dtype
        assert_close(model(ids, mask)[mask].float(), reference(ids, mask)[mask], atol=tolerance, rtol=0)
        assert_close(model.cached.float(), reference.cached, atol=tolerance, rtol=0)


def test_autocast_trains_and_decodes():
    model = GPT(SIZES['odd'])
    ids, mask, new = torch.randint(0, 37, (3, 6)), random_mask(3, 6, 'left'), torch.randint(0, 37, (6, 4))
    with torch.autocast('cpu', torch.bfloat16):
        whole = model.extend(new, model.prefill(ids, mask))
        with torch.no_grad():
            prefix, cache = model.prefill(ids, mask), KVCache()
            steps = torch.cat([model.extend(new[:, t:t+1], prefix, cache) for t in range(4)], 1)
    whole.float().square().mean().backward()
    assert_close(steps.float(), whole.float(), atol=0.1, rtol=0)
    assert all(p.grad.isfinite().all() and p.grad.dtype == torch.float32 for p in model.parameters())


def test_inference_mode_first_and_training_after():
    causal_bias.cache_clear()
    model, ids = GPT(SIZES['odd']), torch.randint(0, 37, (3, 6))
    with torch.inference_mode():
        model.extend(ids, model.prefill(ids), KVCache())
    model.extend(ids, model.prefill(ids)).sum().backward()
    assert not causal_bias(6, 6, 0, torch.float32, ids.device).is_inference()


def test_a_deep_copy_is_independent():
    model, ids = GPT(SIZES['odd']), torch.randint(0, 37, (3, 6))
    reference = copy.deepcopy(model)
    before = reference(ids)
    with torch.no_grad():
        model.wte.weight += 1
    assert torch.equal(reference(ids), before)


# ---- devices

def test_no_tensor_is_made_on_another_device_and_nothing_waits_for_one():
    """On the meta device nothing has a value, so a stray CPU tensor or a question like `lengths.max()` fails."""
    with torch.device('meta'):
        model = GPT(SIZES['odd'])
        ids = torch.zeros(3, 6, dtype=torch.long)
        new, rows = torch.zeros(6, 1, dtype=torch.long), torch.zeros(4, dtype=torch.long)
    prefix, cache = model.prefill(ids), KVCache()
    assert model(ids).device.type == model.extend(new.expand(6, 5), prefix).device.type == 'meta'
    with torch.no_grad():
        model.extend(new, prefix, cache)
        cache.select(rows)
        assert model.extend(new[:4], prefix, cache, [2, 0, 2]).shape == (4, 1, 21)


@pytest.mark.parametrize('T, past', [(1, 0), (1, 5), (4, 0), (3, 2)])
@pytest.mark.parametrize('padding', [False, True])
@pytest.mark.parametrize('left', [None, [0, 3, 4, 11]])
def test_prompts_repeated_for_each_row_give_the_same_attention(T, past, padding, left):
    torch.manual_seed(0)
    rows = None if left is None else torch.tensor(left)
    N = 12 if rows is None else len(left)
    def some(*shape): return torch.randn(*shape, dtype=torch.float64, requires_grad=True)
    prompt_k, prompt_v, q = some(3, 2, 7, 5), some(3, 2, 7, 5), some(N, 2, T, 5)
    k, v = some(N, 2, past+T+2, 5), some(N, 2, past+T+2, 5)    # places behind the new tokens hold anything
    bias = torch.zeros(3, 1, 1, 7, dtype=torch.float64).masked_fill(torch.arange(7) < torch.tensor([0, 4, 6])[:, None, None, None], -torch.inf) if padding else None
    found = []
    own_bias = causal_bias(T, k.shape[2], past, q.dtype, q.device)
    for out in (attend_after(q, k, v, prompt_k, prompt_v, bias, rows, 12, past), attend_repeated(q, k, v, prompt_k, prompt_v, own_bias, bias, rows, 12)):
        found.append((out, *torch.autograd.grad(out.square().sum(), (q, k, v, prompt_k, prompt_v))))
    for one, other in zip(*found): assert_close(one, other, atol=1e-12, rtol=1e-10)


@pytest.mark.skipif(not torch.cuda.is_available(), reason='no GPU')
@pytest.mark.parametrize('V', [1, 63, 64, 65, 777])
def test_an_embedding_is_padded_to_even_sizes(V):
    embedding = torch.randn(V, 3, device='cuda', requires_grad=True)
    wide = pad_vocabulary(embedding)
    assert len(wide) % 64 == 0 and len(wide) - V < 64 and wide[:V].equal(embedding) and not wide[V:].any()
    wide.sum().backward()
    assert embedding.grad.eq(1).all() and pad_vocabulary(embedding.cpu()).shape == (V, 3)


@pytest.mark.skipif(not torch.cuda.is_available(), reason='no GPU')
def test_a_gpu_computes_the_same():
    model = noisy(SIZES['odd'])
    prompts, mask, new, expected = grouped_case(model, 3, 4, 6, 5, 'left')
    model, prompts, mask, new = (x.cuda() for x in (model, prompts, mask, new))
    with torch.no_grad():
        prefix, cache, rows = model.prefill(prompts, mask), KVCache(), torch.tensor([1, 2, 11], device='cuda')
        assert_close(model.extend(new, prefix).cpu(), expected, atol=1e-4, rtol=1e-4)
        model.extend(new[:, :3], prefix, cache)
        cache.select(rows)
        assert_close(model.extend(new[rows, 3:], prefix, cache, [2, 0, 1]).cpu(), expected[rows.cpu(), 3:], atol=1e-4, rtol=1e-4)


# ---- what is refused, and how

@pytest.mark.parametrize(('change', 'words'), [({'n_head': 5}, 'n_head=5 .* n_embd=768'), ({'n_layer': 0}, 'n_layer .* 0'),
                                               ({'vocab_size': -1}, 'vocab_size .* -1'), ({'n_embd': 7.5}, 'n_embd .* 7.5'),
                                               ({'n_positions': None}, 'n_positions .* None'), ({'n_layer': True}, 'n_layer .* True')])
def test_impossible_shapes_are_refused_by_name(change, words):
    with pytest.raises(ModelConfigError, match=words):
        GPTConfig(**change)


def test_too_long_sequences_are_refused():
    model = GPT(SIZES['tiny'])  # 16 positions
    model(torch.zeros(1, 16, dtype=torch.long))
    with pytest.raises(SequenceError, match='17 tokens .* n_positions=16'):
        model(torch.zeros(1, 17, dtype=torch.long))
    prefix = model.prefill(torch.zeros(2, 10, dtype=torch.long), torch.tensor([[0]*4+[1]*6, [0]*8+[1]*2]))    # the longest counts
    model.extend(torch.zeros(2, 10, dtype=torch.long), prefix)  # 6 real tokens and 10: just fits
    with pytest.raises(SequenceError, match='17 tokens'):
        model.extend(torch.zeros(2, 11, dtype=torch.long), prefix)
    with torch.no_grad():
        cache = KVCache()
        model.extend(torch.zeros(2, 10, dtype=torch.long), prefix, cache)
        with pytest.raises(SequenceError, match='17 tokens'):
            model.extend(torch.zeros(2, 1, dtype=torch.long), prefix, cache)


def test_wrong_shapes_are_refused():
    model, ids = GPT(SIZES['tiny']), torch.zeros(3, 4, dtype=torch.long)
    for bad in (ids[0], ids[:0], ids[:, :0]):
        with pytest.raises(SequenceError, match='ids must be'):
            model(bad)
    with pytest.raises(SequenceError, match=r'\(3, 3\).*\(3, 4\)'):
        model(ids, torch.ones(3, 3))
    with pytest.raises(SequenceError, match='prompt 1 has no real token'):
        model.prefill(ids, torch.tensor([[1]*4, [0]*4, [0]*3+[1]]))
    for counts, words in ((None, '2, 2, 2'), ([3, 3], '3, 3'), ([1, 2, 3], '1, 2, 3')):
        with pytest.raises(SequenceError, match=f'7 rows cannot continue 3 prompts with {words} rows'):
            model.extend(torch.zeros(7, 1, dtype=torch.long), model.prefill(ids), counts=counts)
    for bad in (ids[0], ids[:, :0]):
        with pytest.raises(SequenceError, match='ids must be'): model.extend(bad, model.prefill(ids))


def test_a_foreign_cache_is_refused():
    model, ids = GPT(SIZES['tiny']), torch.zeros(3, 4, dtype=torch.long)
    with torch.no_grad():
        prefix, cache = model.prefill(ids), KVCache()
        model.extend(ids[:, :2], prefix, cache)
        for rows, words in ((2, '3 prompts'), (6, 'the 3 of the cache')):
            with pytest.raises(SequenceError, match=f'{rows} rows cannot continue {words}'):
                model.extend(torch.zeros(rows, 1, dtype=torch.long), prefix, cache)
