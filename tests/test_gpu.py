"""A GPU's fast paths give what the plain ones give; all but the CPU's tests of them need one."""
import copy
import gc
import math
import weakref

import pytest
import torch
from torch.testing import assert_close

from rookworld_nb import graphs
from rookworld_nb.graphs import DecodingTables, GraphDecoder, attend_at, attend_fused, draw_fused, products, twin_of
from rookworld_nb.hardware import HardwareConfig, prepare_model, use_hardware
from rookworld_nb.model import GPT, GPTConfig, SequenceError
from rookworld_nb.positions import by_task, shipped
from rookworld_nb.sampling import SamplingError, completion_logprobs, draw, encode_prompts, generate, sample
from rookworld_nb.weights import end_token_id, load_pretrained

GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason='needs a GPU')
DEVICES = ['cpu', pytest.param('cuda', marks=GPU)]


@pytest.fixture(scope='module')
def nano():
    model, tokenizer = load_pretrained('nano')
    return model.requires_grad_(False), tokenizer


def prompts_of(task, n):
    "The second of them is cut short, so that it is padded."
    texts = [s.prompt for s in by_task(shipped('train'))[task][:n]]
    return [text[:60] if i == 1 else text for i, text in enumerate(texts)]


def written(nano, device, task, n, temperature, group=4, limit=100, decoder=True, **options):
    model, tokenizer = nano
    model, end = copy.deepcopy(model).to(device), end_token_id(tokenizer)
    ids, mask = (x.to(device) for x in encode_prompts(tokenizer, prompts_of(task, n), end))
    model.decoder = GraphDecoder() if decoder else None
    return generate(model, ids, mask, group, limit, temperature, end, torch.Generator().manual_seed(3), **options)


def same(one, other, atol=1e-4):
    assert one[0].equal(other[0]) and one[1].equal(other[1])
    assert_close(one[2], other[2], atol=atol, rtol=0)


@pytest.mark.parametrize('device', DEVICES)
@pytest.mark.parametrize('task', 'PA')
@pytest.mark.parametrize('temperature', [0., .9])
def test_the_recorded_step_samples_what_the_plain_loop_samples(nano, device, task, temperature):
    for n in (5, 1): same(written(nano, device, task, n, temperature), written(nano, device, task, n, temperature, decoder=False))


@pytest.mark.parametrize('device', DEVICES)
@pytest.mark.parametrize('limit', [1, 15, 16, 17])
def test_any_limit(nano, device, limit):
    same(written(nano, device, 'A', 3, .9, limit=limit), written(nano, device, 'A', 3, .9, limit=limit, decoder=False))


@pytest.mark.parametrize('device', DEVICES)
def test_a_share_of_the_prompts_is_answered_as_among_all(nano, device):
    whole, part = written(nano, device, 'P', 5, .9), written(nano, device, 'P', 5, .9, share=slice(2, 4))
    n = part[0].shape[1]
    same([x[8:16, :n] for x in whole], part)


@pytest.mark.parametrize('device', DEVICES)
def test_no_token_ends_a_row(device):
    torch.manual_seed(0)
    model = GPT(GPTConfig(2, 2, 48, 301, 64)).to(device).requires_grad_(False)    # heads of 24, an odd vocabulary
    ids = torch.randint(0, 301, (3, 7), device=device)
    rows = []
    for decoder in (None, GraphDecoder()):
        model.decoder = decoder
        rows.append(generate(model, ids, torch.ones_like(ids, dtype=torch.bool), 5, 20, 1., -1, torch.Generator().manual_seed(0)))
    same(*rows)
    assert rows[0][0].shape == (15, 20) and rows[1][1].all()


@pytest.mark.parametrize('device', DEVICES)
@pytest.mark.parametrize('bf16', [False, True])
def test_the_recording_follows_the_weights(nano, device, bf16):
    model, tokenizer = copy.deepcopy(nano[0]).to(device), nano[1]
    model.bf16, model.decoder = bf16, GraphDecoder()
    def now(): return sample(model, tokenizer, prompts_of('P', 3), 4, 30, 0.).completion_ids
    first = now()
    recorded = dict(model.decoder.recorded)
    with torch.no_grad(): model.h[0].mlp.c_fc.weight.mul_(-1)
    other = now()
    assert other.shape != first.shape or not other.equal(first)
    assert {key: id(value) for key, value in recorded.items()} == {key: id(value) for key, value in model.decoder.recorded.items()}
    with torch.no_grad(): model.h[0].mlp.c_fc.weight.mul_(-1)
    assert now().equal(first)
    kept = model.wte.weight    # noqa: F841 - stays alive, so that the new weights lie elsewhere
    model.wte.weight = torch.nn.Parameter(model.wte.weight.flip(0))
    model.decoder, again = None, now()
    plain = now()
    assert again.equal(plain)


@pytest.mark.parametrize('device', DEVICES)
def test_few_recordings_are_kept(nano, device):
    model, tokenizer = copy.deepcopy(nano[0]).to(device), nano[1]
    model.decoder = GraphDecoder()
    for group in range(1, 8): sample(model, tokenizer, prompts_of('P', 2), group, 5, 1.)
    assert len(model.decoder.recorded) == GraphDecoder.KEPT
    sample(model, tokenizer, prompts_of('P', 2), 7, 5, 1.)
    sample(model, tokenizer, prompts_of('P', 1), 7, 5, 1.)    # another number of prompts


@pytest.mark.parametrize('device', DEVICES)
@pytest.mark.parametrize('temperature', [0., .9])
def test_broken_weights_are_named_and_leave_nothing_behind(nano, device, temperature):
    model, tokenizer = copy.deepcopy(nano[0]).to(device), nano[1]
    model.decoder = GraphDecoder()
    right = sample(model, tokenizer, prompts_of('P', 3), 4, 30, temperature, torch.Generator().manual_seed(0)).completion_ids
    good = model.h[2].attn.c_attn.weight.clone()
    with torch.no_grad(): model.h[2].attn.c_attn.weight[-1] = math.nan
    with pytest.raises(SamplingError, match='NaN or infinity'): sample(model, tokenizer, prompts_of('P', 3), 4, 30, temperature, torch.Generator().manual_seed(0))
    with torch.no_grad(): model.h[2].attn.c_attn.weight.copy_(good)
    assert sample(model, tokenizer, prompts_of('P', 3), 4, 30, temperature, torch.Generator().manual_seed(0)).completion_ids.equal(right)


def test_a_copy_of_a_model_has_no_recordings_and_a_twin_shares_what_is_not_converted(nano):
    model = copy.deepcopy(nano[0])
    model.decoder = GraphDecoder()
    sample(model, nano[1], prompts_of('P', 1), 1, 2, 1.)
    assert model.decoder.recorded and not copy.deepcopy(model).decoder.recorded
    model.bf16 = True
    twin = twin_of(model)
    assert twin.wte.weight is model.wte.weight and twin.h[0].ln_1.bias is model.h[0].ln_1.bias
    assert {p.dtype for p in products(twin)} == {torch.bfloat16} and {p.dtype for p in model.parameters()} == {torch.float32}


@pytest.mark.parametrize('device', DEVICES)
def test_the_recording_that_was_not_used_for_longest_goes(nano, device):
    model, tokenizer = copy.deepcopy(nano[0]).to(device), nano[1]
    model.decoder = GraphDecoder()
    for temperature in (1., .9, .8, .7, 1., .5): sample(model, tokenizer, prompts_of('P', 1), 1, 2, temperature)
    assert [options[0] for _, options in model.decoder.recorded] == [.8, .7, 1., .5]
    model.decoder.forget()
    assert not model.decoder.recorded and model.decoder.twin is None


def test_a_model_that_nobody_wants_is_let_go(nano):
    model = copy.deepcopy(nano[0])
    model.decoder = GraphDecoder()
    sample(model, nano[1], prompts_of('P', 1), 1, 2, 1.)
    seen = weakref.ref(model)
    gc.disable()
    try:
        del model
        assert seen() is None
    finally: gc.enable()


@pytest.mark.parametrize('device', DEVICES)
def test_inference_mode_first_and_plain_sampling_after_it(nano, device):
    model, tokenizer = copy.deepcopy(nano[0]).to(device), nano[1]
    model.decoder = GraphDecoder()
    with torch.inference_mode(): first = sample(model, tokenizer, prompts_of('P', 2), 2, 9, 0.).texts
    assert sample(model, tokenizer, prompts_of('P', 2), 2, 9, 0.).texts == first


@pytest.mark.parametrize('device', DEVICES)
def test_more_tokens_than_positions_are_refused(device):
    model = GPT(GPTConfig(1, 1, 8, 11, 16)).to(device).requires_grad_(False)
    model.decoder, ids = GraphDecoder(), torch.ones(1, 10, dtype=torch.int64, device=device)
    with pytest.raises(SequenceError, match='17 tokens are more than the n_positions=16'): generate(model, ids, ids.bool(), 1, 8, 1., -1)
    assert generate(model, ids, ids.bool(), 1, 7, 1., -1)[0].shape == (1, 7)


@pytest.mark.parametrize('device', DEVICES)
@pytest.mark.parametrize('bf16', [False, True])
def test_float64_stays_float64(bf16, device):
    torch.manual_seed(0)
    model = GPT(GPTConfig(2, 2, 16, 11, 32)).double().requires_grad_(False).to(device)
    ids, found = torch.randint(0, 11, (2, 5), device=device), []
    model.bf16 = bf16
    for model.decoder in (None, GraphDecoder()):
        found.append(generate(model, ids, ids >= 0, 3, 9, 1., -1, torch.Generator().manual_seed(0)))
    same(*found)


@pytest.mark.parametrize('device', DEVICES)
def test_tables_are_filled_anew(nano, device):
    model = copy.deepcopy(nano[0]).to(device)
    tables = DecodingTables(model, 4, 16, 2, 16)
    prefix = model.prefill(torch.randint(0, 700, (3, 9), device=device))
    for table in vars(tables).values():
        for x in table if isinstance(table, list) else [table]: x.fill_(1)
    tables.fill(prefix, torch.rand(5, 6, device=device), 7)
    assert tables.done.tolist() == [False]*6 + [True]*2 and tables.at.item() == 0 and not tables.mask.any() and (tables.ids == 7).all()
    assert tables.bias[:3, ..., :9].eq(0).all() and tables.bias[3].isinf().all() and tables.bias[..., 9:].isinf().all()


@GPU
def test_prepare_model_asks_for_recordings_on_a_gpu_only(nano):
    model = copy.deepcopy(nano[0])
    assert prepare_model(model, HardwareConfig()).decoder is None
    model.cuda()
    assert isinstance(prepare_model(model, HardwareConfig()).decoder, GraphDecoder)
    assert prepare_model(model, HardwareConfig(cuda_graphs=False)).decoder is None
    assert 'CUDA graphs: off' in use_hardware(HardwareConfig(cuda_graphs=False), 'cuda')


@GPU
@pytest.mark.parametrize('dtype, atol', [(torch.float32, 1e-5), (torch.bfloat16, .02)])
@pytest.mark.parametrize('B, G, H, d, width, limit', [(3, 4, 2, 32, 21, 40), (2, 2, 3, 24, 5, 16), (32, 8, 12, 64, 48, 112)])
def test_the_kernel_of_attention_is_its_plain_form(dtype, atol, B, G, H, d, width, limit):
    torch.manual_seed(0)
    make = lambda *shape: torch.randn(*shape, device='cuda').to(dtype)    # noqa: E731
    bias = torch.zeros(B, 1, 1, width, device='cuda')
    bias[0, ..., 3:], bias[1] = -math.inf, -math.inf
    for t in (0, 1, 15, limit - 1):
        q, k, v = make(B*G, 1, 3, H, d).permute(2, 0, 3, 1, 4)
        prompt_k, prompt_v, keys, values = make(B, H, width, d), make(B, H, width, d), make(B*G, H, limit, d), make(B*G, H, limit, d)
        other, at = (keys.clone(), values.clone()), torch.tensor([t], device='cuda')
        plain = attend_at(q, k, v, prompt_k, prompt_v, bias, keys, values, at)
        assert_close(attend_fused(q, k, v, prompt_k, prompt_v, bias, *other, at), plain, atol=atol, rtol=0)
        assert other[0].equal(keys) and other[1].equal(values)


@GPU
@pytest.mark.parametrize('V', [5, 777, 4096, 50257])
@pytest.mark.parametrize('temperature', [.7, 1.])
def test_the_kernel_of_drawing_is_its_plain_form(V, temperature):
    torch.manual_seed(0)
    logits = torch.randn(512, V + 3, device='cuda')[:, :V]*3
    noise = torch.rand(512, device='cuda')
    noise[:4] = torch.tensor([0., 1e-7, .5, 1 - 2**-24])
    ids, logprobs = draw(logits, temperature, noise)
    fast, fast_logprobs = draw_fused(logits, temperature, noise)
    alike = ids == fast
    assert alike.float().mean() > .98    # neighbours where rounding decides
    assert_close(logprobs[alike], fast_logprobs[alike], atol=1e-4, rtol=0)
    assert_close(fast_logprobs, (logits/temperature).log_softmax(-1).gather(1, fast[:, None])[:, 0], atol=1e-4, rtol=0)
    cumulative = (logits.double()/temperature).softmax(-1).cumsum(-1)
    upper, lower = (cumulative.gather(1, fast[:, None])[:, 0], cumulative.gather(1, (fast - 1).clamp(min=0)[:, None])[:, 0].where(fast > 0, 0.))
    assert (lower <= noise + 1e-5).all() and (noise <= upper + 1e-5).all()


def scored(model, device, task='P', seed=0):
    "Log-probabilities of random continuations of real prompts, and the gradient of their sum."
    torch.manual_seed(seed)
    prompts = torch.randint(0, model.cfg.vocab_size, (4, 20))
    mask = torch.arange(20) >= torch.tensor([[0], [5], [0], [19]])
    done = torch.randint(0, model.cfg.vocab_size, (12, 30))
    real = torch.arange(30) < torch.randint(1, 31, (12, 1))
    done[4], real[4] = done[3], real[3]    # equal: computed once
    model.zero_grad()
    logprobs, entropy = completion_logprobs(model, *(x.to(device) for x in (prompts, mask, done)), real.to(device), 3, 1.)
    (logprobs + .1*entropy).sum().backward()
    return logprobs.detach().cpu(), torch.cat([p.grad.flatten().cpu() for p in model.parameters()])


@GPU
@pytest.mark.parametrize('settings, logprobs, gradient', [
    ({}, 1e-4, 1e-5), ({'gradient_checkpointing': True}, 1e-4, 1e-5), ({'compile': 'default'}, 1e-4, 1e-5), ({'matmul_precision': 'high'}, .02, 2e-3),
    ({'bf16': True}, .2, .03), ({'bf16': True, 'compile': 'default'}, .2, .03)])
def test_the_update_of_a_gpu_is_that_of_a_cpu(settings, logprobs, gradient):
    torch.manual_seed(1)
    model = GPT(GPTConfig(3, 4, 128, 777, 128))
    plain, exact_gradient = scored(model, 'cpu')
    model.cuda()
    config = HardwareConfig(**settings)
    use_hardware(config, 'cuda')
    fast, fast_gradient = scored(prepare_model(model, config), 'cuda')
    gaps = float((fast - plain).abs().max()), float((fast_gradient - exact_gradient).norm()/exact_gradient.norm())
    print(settings, gaps)
    assert gaps[0] < logprobs and gaps[1] < gradient


@GPU
@pytest.mark.parametrize('settings, atol', [({}, 1e-4), ({'cuda_graphs': False}, 1e-4), ({'bf16': True, 'matmul_precision': 'high'}, .1)])
def test_sampled_log_probabilities_survive_a_recomputation(nano, settings, atol):
    model, tokenizer = copy.deepcopy(nano[0]).cuda(), nano[1]
    config = HardwareConfig(**settings)
    use_hardware(config, 'cuda')
    r = sample(prepare_model(model, config), tokenizer, prompts_of('P', 8), 8, 100, .9, torch.Generator().manual_seed(0))
    again, _ = completion_logprobs(model, r.prompt_ids, r.prompt_mask, r.completion_ids, r.completion_mask, 8, .9)
    gap = float((again - r.logprobs).abs().max())
    print(settings, gap)
    assert gap < atol


def test_where_triton_does_not_work_sampling_says_so_and_goes_on(monkeypatch, caplog):
    def broken(*inputs): raise RuntimeError('Failed to find C compiler')
    monkeypatch.setattr(graphs, 'triton', object())
    monkeypatch.setattr(graphs, 'draw_fused', broken)
    monkeypatch.setattr(torch, 'zeros', lambda *shape, device: None)
    graphs.has_kernels.cache_clear()
    assert not graphs.has_kernels(torch.device('cuda')) and not graphs.has_kernels(torch.device('cuda'))
    assert [record.message for record in caplog.records] == ['sampling goes without kernels of its own, and slower: Triton does not work here (Failed to find C compiler)']
    graphs.has_kernels.cache_clear()
    assert not graphs.has_kernels(torch.device('cpu'))
