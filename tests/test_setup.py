"From a configuration to working parts, on the embedded model: what is looked at first, the plan, trials of a batch."
import json
from contextlib import closing
from dataclasses import replace

import chess
import pytest
import torch

from rookworld_nb.config import BY_SIZE, RunError, TrainConfig
from rookworld_nb.graphs import GraphDecoder
from rookworld_nb.model import GPT, GPTConfig
from rookworld_nb.positions import DataError, by_task, is_rare, shipped, write_lines
from rookworld_nb.records import read_metrics
from rookworld_nb.rewards import EngineSilentError
from rookworld_nb.rules import LABEL_NODES, Stockfish, fen_key, find_stockfish
from rookworld_nb.run import Run
from rookworld_nb.sampling import PromptLengthError
from rookworld_nb.setup import Setup, examine, glance, heldout_samples, planned_work, run_folder, training_samples, trial_run
from rookworld_nb.tasks import parse_env
from rookworld_nb.weights import ModelNameError, load_pretrained, save_pretrained
from short_runs import SHORT, TINY


def test_the_plan_counts_what_is_sampled(tmp_path):
    for number, (changes, text) in enumerate((({'minibatch_positions': 4}, '3 on each of 3 batches of 6 prompts'), ({'max_age': 1}, '1 on each of 7 batches'))):
        run = Setup(replace(TINY, steps=7, batch_positions=6, buffer_capacity=1, max_new_tokens=8, output_dir=str(tmp_path/f'run-{number}'), **changes))
        sampled = {run.buffer.newest.number for _, _ in zip(range(7), run.buffer)}
        assert text in planned_work(run) and f'of {len(sampled)} batches' in planned_work(run)


def test_the_plan_says_whose_held_out_positions_they_are(tmp_path):
    write_lines(by_task(shipped('train'))['P'][:20], tmp_path/'own.txt')
    with closing(Setup(replace(TINY, output_dir=str(tmp_path/'run')))) as run: assert 'of the package' not in planned_work(run)
    own = replace(TINY, data=str(tmp_path/'own.txt'), mix_env_ratio=0., answer_coef=0., answer_positions=TrainConfig.answer_positions, eval_policy=6, output_dir=str(tmp_path/'run'))
    with closing(Setup(own)) as run: assert '6 held-out positions, of the package and not of --data' in planned_work(run)


def test_two_runs_of_one_second_have_folders_of_their_own():
    assert len({run_folder(TrainConfig()) for _ in range(20)}) == 20


def test_heldout_positions_never_reach_training(tmp_path, caplog):
    heldout = shipped('heldout')
    write_lines(shipped('heldout')[:50] + shipped('stress')[:5] + shipped('train')[:50] + shipped('train')[-50:], tmp_path/'mixed.txt')
    samples = training_samples(replace(SHORT, eval_policy=0, eval_env=0, data=str(tmp_path/'mixed.txt')))    # other runs examine them
    assert f'{155 - len(samples)} of 155 lines show positions of the evaluation' in caplog.text
    assert len(samples) == 100 and not {fen_key(s.fen) for s in samples} & {fen_key(s.fen) for s in heldout}


def test_a_label_that_is_not_read_is_said(tmp_path, caplog):
    "Where the engine judges while the run goes on, no target is read at all."
    fen, path = chess.STARTING_FEN, tmp_path/'own.txt'
    lines = [f'P: {fen} M: e2e4 d2d4 E: 0.3 {second} B: {best}' for second, best in (('0.2', 'e2e4'), ('0.3', 'd2d4'), ('0.2', 'd2d4'), ('0.2', 'a2a3'))]
    path.write_text('\n'.join(lines[:2]))
    config = replace(SHORT, data=str(path), mix_env_ratio=0.)
    assert len(training_samples(config)) == 2 and not caplog.text
    path.write_text('\n'.join(lines))
    training_samples(replace(config, stockfish_path='stockfish'))
    assert not caplog.text
    training_samples(config)
    assert 'in 2 of 4 P: lines another move than the B: has the highest evaluation' in caplog.text


def test_right_answers_need_prompts_to_answer(tmp_path):
    write_lines(by_task(shipped('train'))['P'][:20], tmp_path/'policy.txt')
    given = replace(SHORT, data=str(tmp_path/'policy.txt'), mix_env_ratio=0.)
    assert len(training_samples(given)) == 20
    with pytest.raises(DataError, match='--answer-coef 0.5: the data hold no A: prompt with a legal move'): training_samples(replace(given, answer_coef=.5))
    write_lines([one for one in by_task(shipped('train'))['A'] if parse_env(one.completion).truncated], tmp_path/'policy.txt')
    with pytest.raises(DataError, match='with a legal move'): training_samples(replace(given, mix_env_ratio=1., answer_coef=.5))


@pytest.mark.stockfish
def test_the_answers_of_the_engine_are_kept_from_run_to_run(tmp_path):
    config = replace(SHORT, stockfish_path=find_stockfish(), engine_cache=str(tmp_path/'deep'/'answers.db'), output_dir=str(tmp_path/'run'))
    with closing(Setup(config)) as first: told = first.engine.analyse(chess.STARTING_FEN)
    assert (first.engine.cache.found, first.engine.cache.asked) == (0, 1)
    with closing(Setup(config)) as second: assert second.engine.analyse(chess.STARTING_FEN) == told and (tmp_path/'deep'/'answers.db').exists()
    assert (second.engine.cache.found, second.engine.cache.asked) == (1, 1)
    with pytest.raises(RunError, match='--engine-cache .*: of no use without --stockfish-path'): replace(config, stockfish_path=None)


def test_a_model_used_to_longer_histories_than_there_are_is_said(tmp_path, caplog):
    Setup(replace(SHORT, output_dir=str(tmp_path/'run')))
    assert 'history' not in caplog.text
    Setup(replace(SHORT, history_plies=3, output_dir=str(tmp_path/'run')))
    assert '--history-plies 3: no A: prompt shows more than 1 of the last moves' in caplog.text


def test_few_prompts_for_a_batch_are_said(tmp_path):
    write_lines(by_task(shipped('train'))['P'][:3], tmp_path/'few.txt')
    config = replace(SHORT, data=str(tmp_path/'few.txt'), mix_env_ratio=0., rare_env_ratio=.15, output_dir=str(tmp_path/'run'))
    assert '; 3 P: prompts (so few that a batch repeats some) to draw from' in planned_work(Setup(config))
    assert ' P: prompts to draw from' in planned_work(Setup(replace(config, data=None)))


def test_a_few_positions_are_taken_from_everywhere_in_the_file(tmp_path, caplog):
    some = by_task(training_samples(replace(SHORT, max_positions=200)))
    assert [len(some[task]) for task in 'PA'] == [200, 200] and sum(map(is_rare, some['A'])) > 10    # they stand at the end
    assert not caplog.text
    write_lines(by_task(shipped('train'))['A'][:20], tmp_path/'ordinary.txt')
    training_samples(replace(SHORT, data=str(tmp_path/'ordinary.txt')))
    assert '--rare-env-ratio 0.15: none of the 20 A: prompts' in caplog.text
    asked = by_task(shipped('train'))['A']
    write_lines([sample for sample in asked if not is_rare(sample)][:200] + [next(filter(is_rare, asked))], tmp_path/'few.txt')
    training_samples(replace(SHORT, data=str(tmp_path/'few.txt'), max_positions=None))
    assert '1 of the 201 A: prompts have a rare outcome, and each is dealt 35 times as often as another' in caplog.text


@pytest.mark.parametrize('ratio, count', [(0., 4259), (.15, 4800), (1., 541), (None, 4800)])
def test_the_plan_leaves_out_a_kind_of_prompt_that_has_no_share(ratio, count, caplog):
    assert f'; 10000 P: and {count} A: prompts to draw from' in planned_work(Setup(TrainConfig(rare_env_ratio=ratio, max_new_tokens=10**5)))
    assert not caplog.text


def test_the_plan_knows_how_long_a_text_may_be():
    assert 'of up to 255 tokens' in planned_work(Setup(TrainConfig(max_new_tokens=10**5)))


@pytest.mark.parametrize('changes, message', [
    (dict(data='nowhere.txt'), 'nowhere.txt'), (dict(device='cuda:99'), 'cuda:99'), (dict(reference_device='cuda:99'), '--reference-device cuda:99'), (dict(model='no-such-model'), 'no-such-model'),
    (dict(eval_policy=10**6), '--eval-policy'), (dict(batch_positions=0), '--batch-positions 0'),
    (dict(stockfish_path='/no/engine'), '/no/engine'), (dict(stockfish_path='/bin/true'), "/bin/true failed twice on 'uci'")])
def test_bad_inputs_are_refused_before_anything_is_written(tmp_path, changes, message):
    with pytest.raises(ValueError, match=message):
        Run(replace(SHORT, output_dir=str(tmp_path/'run'), **changes))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize('n_positions', [84, 85])    # nano's tokenizer makes 84 tokens of an A: prompt, 77 of a P: prompt
@pytest.mark.parametrize('held_out', [False, True])
def test_a_prompt_that_leaves_no_room_is_refused_before_anything_is_written(tmp_path, n_positions, held_out):
    tokenizer = load_pretrained('nano')[1]
    model = save_pretrained(GPT(GPTConfig(1, 2, 16, tokenizer.get_vocab_size(), n_positions)), tokenizer, tmp_path/'model')
    config = replace(TINY, model=str(model), output_dir=str(tmp_path/'run'), mix_env_ratio=0. if held_out else .4, eval_env=2*held_out, eval_policy=2, answer_coef=0.,
                     answer_positions=TrainConfig.answer_positions)
    if held_out: write_lines(by_task(shipped('train'))['P'][:20], tmp_path/'positions.txt')
    config = replace(config, data=str(tmp_path/'positions.txt') if held_out else None)
    if n_positions == 85: return Run(config).close()
    with pytest.raises(PromptLengthError, match="prompt 'A: .*' has 84 tokens; the model has n_positions=84, so 83 at most"): Run(config)
    assert not (tmp_path/'run').exists()


@pytest.mark.stockfish
def test_a_live_engine_can_judge(tmp_path):
    run = Run(replace(SHORT, stockfish_path=find_stockfish(), output_dir=str(tmp_path/'live'), mix_env_ratio=0., eval_policy=0, eval_env=0))
    assert isinstance(run.scorer.engine, Stockfish) and not any(sample.completion for sample in run.samples if sample.task == 'P')
    assert next(run.steps())['reward'] != 0
    asked = run.scorer.patient.asked
    assert set(asked) <= {sample.fen for sample in run.samples} and all(question.done() for question in asked.values()) and asked
    process = run.engine._process._popen
    run.close()
    assert process.poll() is not None


def test_a_live_engine_that_is_dead_ends_the_run_even_in_small_batches(tmp_path):
    dead = tmp_path/'engine'
    dead.write_text('#!/bin/sh\nwhile read word rest; do case $word in uci) echo uciok;; isready) echo readyok;; position) exit 1;; esac; done\n')
    dead.chmod(0o755)
    run = Run(replace(SHORT, stockfish_path=str(dead), output_dir=str(tmp_path/'run'), mix_env_ratio=0., eval_policy=0, eval_env=0,
                      batch_positions=3, group_size=2, replays=1, steps=20, max_new_tokens=8))
    with pytest.raises(EngineSilentError, match='8 questions in a row'):
        list(run.steps())
    rows = read_metrics(run.folder)
    assert rows['completions/unjudged'].tolist() == [1.]*len(rows) and len(rows) <= 2  # the third batch asks the eighth question


def test_what_is_left_open_follows_from_the_size_of_the_model(tmp_path, monkeypatch):
    save_pretrained(*load_pretrained('nano'), tmp_path/'mine')
    config = replace(TINY, model=str(tmp_path/'mine'), replays=None, batch_positions=None, minibatch_positions=None, lr=3e-4, mix_env_ratio=None)
    for limit, size in ((20_000_000, 'small'), (1000, 'large')):
        monkeypatch.setattr('rookworld_nb.config.SMALL', limit)
        run = Run(replace(config, output_dir=str(tmp_path/size)))
        next(run.steps())
        stored, expected = json.loads((run.folder/'config.json').read_text()), BY_SIZE[size] | {'lr': 3e-4}
        assert {name: stored[name] for name in expected} == expected
        used = run.trainer.config, run.collector.config, run.buffer.config
        assert [used[0].lr, used[0].loss_type, used[0].kl.kl_coef, used[1].temperature, used[2].replays, run.prompts.batch_positions,
                run.prompts.stream.share] == [
            expected[name] for name in ('lr', 'loss_type', 'kl_coef', 'temperature', 'replays', 'batch_positions', 'mix_env_ratio')]


def test_a_batch_is_tried_that_is_smaller_than_what_a_step_learns_from(tmp_path):
    run = Run(replace(TINY, batch_positions=8, minibatch_positions=8, buffer_capacity=1, output_dir=str(tmp_path/'run'), steps=20,
                      kl_warmup_steps=10))    # more than the trial's two steps
    assert trial_run(run, 2, 2).trainer.step == 2 and run.config.minibatch_positions == 8 and run.trainer.step == 0


def test_lines_of_the_evaluation_alone_are_named_as_such(tmp_path):
    write_lines(shipped('heldout')[:20], tmp_path/'lines.txt')
    config = TrainConfig(data=str(tmp_path/'lines.txt'))
    with pytest.raises(ValueError, match='lines.txt: all its positions are those of the evaluation'): training_samples(config)


def test_an_engine_does_not_outlive_a_failure(tmp_path, monkeypatch):
    class Engine:
        name, closed = 'an engine', []
        def __init__(self, path, nodes, cache): self.nodes = nodes
        def __enter__(self): return self
        def __exit__(self, *error): self.closed.append(self)
    monkeypatch.setattr('rookworld_nb.setup.Stockfish', Engine)
    with pytest.raises(ModelNameError): Run(replace(TINY, stockfish_path='x', model='/no/such', output_dir=str(tmp_path/'run')))
    assert [engine.nodes for engine in Engine.closed] == [LABEL_NODES]


def test_evaluations_and_trials_give_back_what_a_decoder_keeps(tmp_path):
    run = Setup(replace(SHORT, output_dir=str(tmp_path/'run'), eval_policy=2, eval_env=1, max_new_tokens=24))
    for model in (run.model, run.reference): model.decoder = GraphDecoder()
    plain = examine(run)
    assert not run.model.decoder.recorded and examine(run, run.reference).equals(plain) and not run.reference.decoder.recorded
    trial_run(run, 2, 2)
    assert not run.model.decoder.recorded
    glance(run)
    assert not run.model.decoder.recorded
    run.model.decoder = None
    assert examine(run)['completion'].equals(plain['completion'])


def test_a_trial_that_does_not_fit_keeps_nothing(tmp_path, monkeypatch):
    def fail(*given):
        assert run.model.decoder.recorded
        raise torch.OutOfMemoryError('CUDA out of memory')
    run = Setup(replace(SHORT, output_dir=str(tmp_path/'run'), max_new_tokens=24))
    run.model.decoder = GraphDecoder()
    monkeypatch.setattr('rookworld_nb.trainer.take_step', fail)
    with pytest.raises(torch.OutOfMemoryError): trial_run(run, 2, 2)
    assert not run.model.decoder.recorded


@pytest.mark.parametrize('prompts, group_size, at_once', [(32, 8, 256), (8, 8, 64), (16, 8, 128), (2, 4, 64), (128, 8, 256)])
def test_an_evaluation_answers_as_many_prompts_at_once_as_the_run(tmp_path, monkeypatch, prompts, group_size, at_once):
    seen = []
    monkeypatch.setattr('rookworld_nb.evaluate.completions', lambda *given: seen.append(given[7]) or [''] * len(given[2]) * given[3])
    run = Setup(replace(SHORT, output_dir=str(tmp_path/'run'), batch_positions=prompts, group_size=group_size, eval_policy=2, eval_env=1, eval_samples=1))
    examine(run)
    glance(run)
    assert {*seen} == {at_once} and len(seen) == 6


def test_the_plan_says_where_a_number_is_only_the_least(tmp_path):
    plan = lambda **changes: planned_work(Run(replace(SHORT, output_dir=str(tmp_path/'run'), **changes)))
    assert 'at least' not in plan() and plan(buffer_capacity=2).count('at least') == 2 == plan(drop_tied=True).count('at least')


def test_the_plan_says_why_whole_answers_are_paid(tmp_path):
    plan = lambda **changes: planned_work(Run(replace(SHORT, output_dir=str(tmp_path/'run'), **changes)))
    assert 'whole answers' not in plan() and 'whole answers' not in plan(credit='answer')
    assert 'whole answers are paid, because of --kl-in-reward, --importance-level sequence' in plan(kl_in_reward=True, importance_level='sequence')


def test_an_answer_that_shows_a_held_out_position_is_left_out_too(tmp_path):
    heldout, train_set = heldout_samples(SHORT), by_task(shipped('train'))
    shown = train_set['A'][0]
    telling = replace(shown, completion=shown.completion.replace(parse_env(shown.completion).new_fen, heldout[0].fen))
    write_lines([telling, *train_set['P'][:3]], tmp_path/'data.txt')
    assert heldout[0].fen in telling.completion
    assert training_samples(replace(SHORT, data=str(tmp_path/'data.txt'))) == train_set['P'][:3]


def test_weights_that_only_show_are_named(tmp_path, caplog):
    Run(replace(SHORT, best_weight=40., fen_weight=30., output_dir=str(tmp_path/'run')))
    assert '--best-weight, --fen-weight: shown in the reward' in caplog.text
    caplog.clear()
    Run(replace(SHORT, best_weight=40., credit='answer', output_dir=str(tmp_path/'run')))
    assert 'shown in the reward' not in caplog.text


def test_the_plan_counts_the_prompts_that_can_be_drawn(tmp_path):
    run = Run(replace(TINY, output_dir=str(tmp_path/'run')))
    counts = {task: len(pool) for task, pool in by_task(run.samples).items()}
    assert f'{counts["P"]} P: and {counts["A"]} A: prompts to draw from' in planned_work(run)
    alone = Run(replace(TINY, mix_env_ratio=0, output_dir=str(tmp_path/'run')))
    assert f'; {counts["P"]} P: prompts to draw from' in planned_work(alone)


def test_an_engine_cache_that_cannot_be_used_is_refused_before_anything_is_made(tmp_path):
    (tmp_path/'folder').mkdir()
    with pytest.raises(ValueError, match="engine cache '.*folder'"):
        Setup(replace(TINY, stockfish_path='x', engine_cache=str(tmp_path/'folder'), output_dir=str(tmp_path/'run')))
    assert not (tmp_path/'run').exists()
