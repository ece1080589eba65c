"The main job from configuration to run folder, on the embedded model, very short."
import json
from dataclasses import replace

import pandas as pd
import pytest
import torch
import transformers

from rookworld_nb.positions import shipped, write_lines
from rookworld_nb.rules import EngineNotFound, Stockfish, fen_key, find_stockfish
from rookworld_nb.run import Run, RunError, TrainConfig, closing_table, heldout_samples, train, training_samples
from rookworld_nb.weights import load_pretrained

SHORT = TrainConfig(steps=4, batch_positions=5, group_size=4, eval_policy=6, eval_env=3, eval_samples=2, save_every=2, warmup_steps=1,
                    temperature=.7, device='cpu')


@pytest.fixture(scope='module')
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp('runs')/'first'
    return train(replace(SHORT, output_dir=str(folder))), folder


def test_the_run_folder_is_complete(finished):
    table, folder = finished
    names = {path.relative_to(folder).as_posix() for path in folder.rglob('*') if path.is_file()}
    wanted = {'config.json', 'metrics.jsonl', 'train.log', 'summary.json', 'reward.png', 'completions/step-000001.csv',
              'completions/step-000003.csv', 'final_checkpoint/model.safetensors', 'final_checkpoint/config.json',
              'final_checkpoint/tokenizer.json', 'checkpoint-2/model.safetensors', 'checkpoint-4/model.safetensors'}
    assert wanted <= names
    assert json.loads((folder/'config.json').read_text())['steps'] == 4
    assert len((folder/'metrics.jsonl').read_text().splitlines()) == 4
    assert set(json.loads((folder/'summary.json').read_text())['comparison'][0]) >= {'before', 'after', 'standard_error', 'z'}


def test_the_table_has_both_tasks_at_both_temperatures(finished):
    table, _ = finished
    assert {(task, temperature) for task, temperature, _ in table.index} == {('P', .7), ('P', 0.), ('A', .7), ('A', 0.)}
    assert 'reward' in closing_table(table) and table.loc[('P', .7, 'reward'), 'n'] == 6


def test_the_first_row_is_the_identity_and_the_second_pass_is_not(finished):
    rows = [json.loads(line) for line in (finished[1]/'metrics.jsonl').read_text().splitlines()]
    assert rows[0]['ratio_max'] == pytest.approx(1, abs=1e-3) and rows[0]['clip_ratio/region_mean'] == 0
    assert rows[0]['kl'] == pytest.approx(0, abs=1e-6) and rows[1]['ratio_max'] > 1.001
    assert [row['step'] for row in rows] == [1, 2, 3, 4] and all('time' in row for row in rows)


def test_the_checkpoint_loads_here_and_in_transformers(finished):
    folder = finished[1]/'final_checkpoint'
    ours, tokenizer = load_pretrained(str(folder))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    ids = torch.tensor([tokenizer.encode(shipped('heldout')[0].prompt).ids])
    torch.testing.assert_close(ours(ids), theirs(ids).logits, atol=1e-4, rtol=1e-4)
    before, _ = load_pretrained('nano')
    assert not torch.equal(before.wte.weight, ours.wte.weight)


def test_completion_tables_hold_every_reward_part(finished):
    table = pd.read_csv(finished[1]/'completions'/'step-000001.csv')
    assert len(table) == 20 and {'prompt', 'completion', 'task', 'advantage', 'format', 'candidates', 'evals', 'best', 'fen', 'flags',
                                 'reward_value', 'raw', 'reward'} <= set(table)
    assert (table.groupby('prompt')['advantage'].sum().abs() < 1e-3).all()


def test_the_same_seed_gives_the_same_run(finished, tmp_path):
    train(replace(SHORT, output_dir=str(tmp_path/'again')))
    rows = [[{k: v for k, v in json.loads(line).items() if 'time' not in k and 'perf' not in k}
             for line in (folder/'metrics.jsonl').read_text().splitlines()] for folder in (finished[1], tmp_path/'again')]
    assert rows[0] == rows[1]


def test_nothing_is_written_before_the_first_step(tmp_path):
    run = Run(replace(SHORT, output_dir=str(tmp_path/'later')))
    assert '4 updates' in run.plan and not (tmp_path/'later').exists()


def test_stopping_early_keeps_a_loadable_checkpoint(tmp_path):
    run = Run(replace(SHORT, output_dir=str(tmp_path/'stopped')))
    steps = run.steps()
    next(steps)
    steps.close()
    assert load_pretrained(str(tmp_path/'stopped'/'final_checkpoint'))[0].cfg == run.model.cfg


def test_a_folder_with_a_run_is_refused(finished):
    with pytest.raises(RunError, match='holds a run already'):
        Run(replace(SHORT, output_dir=str(finished[1])))


def test_heldout_positions_never_reach_training(tmp_path):
    heldout = heldout_samples(SHORT)
    write_lines(shipped('heldout')[:50] + shipped('train')[:50] + shipped('train')[-50:], tmp_path/'mixed.txt')
    samples = training_samples(replace(SHORT, data=str(tmp_path/'mixed.txt')), heldout)
    assert len(samples) < 150 and not {fen_key(s.fen) for s in samples} & {fen_key(s.fen) for s in heldout}


@pytest.mark.parametrize('changes, message', [
    (dict(steps=0), '--steps 0'), (dict(replays=0), '--replays 0'), (dict(temperature=0.), 'temperature'),
    (dict(group_size=1), 'group_size'), (dict(lr_schedule='cosin'), 'cosin'), (dict(reward_shaping='nice'), 'nice'),
    (dict(kl_estimator='k3'), 'k3'), (dict(lr=-1.), 'lr'), (dict(max_positions=0), '--max-positions 0')])
def test_bad_settings_are_refused_at_once(changes, message):
    with pytest.raises(ValueError, match=message):
        replace(SHORT, **changes)


@pytest.mark.parametrize('changes, message', [
    (dict(data='nowhere.txt'), 'nowhere.txt'), (dict(device='cuda:99'), 'cuda:99'), (dict(model='no-such-model'), 'no-such-model'),
    (dict(eval_policy=10**6), '--eval-policy'), (dict(mix_env_ratio=1.5), 'mix_env_ratio'), (dict(batch_positions=0), 'batch_positions'),
    (dict(stockfish_path='/no/engine'), '/no/engine')])
def test_bad_inputs_are_refused_before_anything_is_written(tmp_path, changes, message):
    with pytest.raises(ValueError, match=message):
        Run(replace(SHORT, output_dir=str(tmp_path/'run'), **changes))
    assert not list(tmp_path.iterdir())


def engine_is_there():
    try:
        return bool(find_stockfish())
    except EngineNotFound:
        return False


@pytest.mark.stockfish
@pytest.mark.skipif(not engine_is_there(), reason='Stockfish is not installed')
def test_a_live_engine_can_judge(tmp_path):
    run = Run(replace(SHORT, stockfish_path=find_stockfish(), output_dir=str(tmp_path/'live'), mix_env_ratio=0., eval_policy=0, eval_env=0))
    assert isinstance(run.scorer.engine, Stockfish) and not any(sample.completion for sample in run.samples if sample.task == 'P')
    assert next(run.steps())['reward'] != 0
