"""Losses, gradients, metrics and advantages against those that the trainer of Hugging Face's TRL computes."""
import itertools
import json
from pathlib import Path

import pytest
import torch
from torch.testing import assert_close

trl = pytest.importorskip('trl', reason="TRL is an extra: pip install -c constraints.txt -e '.[parity]'")

from datasets import Dataset
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

from rookworld_nb.grpo import IMPORTANCE_LEVELS, LOSS_TYPES, REWARD_SCALES, compute_advantages, grpo_loss

pytestmark = pytest.mark.filterwarnings('ignore::FutureWarning')  # between TRL and transformers
EXACT = dict(atol=1e-9, rtol=0)
LONGEST = 9  # max_completion_length, which dr_grpo divides by
TABLES = ('logprobs', 'old_logprobs', 'ref_logprobs', 'advantages', 'completion_mask', 'entropy')
METRICS = ('clip_ratio/low_mean', 'clip_ratio/high_mean', 'clip_ratio/region_mean', 'entropy')
CLIPS = [(.2, None), (.1, .25), (0., .3)]  # epsilon, epsilon_high; TRL reads None as: the same on both sides
KL = [(0., True), (.3, True), (.3, False)]  # beta, use_bias_correction_kl


# ---------------------------------------------------------------- TRL: everything but the model's answers is its own

class ReplayTrainer(trl.GRPOTrainer):
    """TRL's trainer, told what was sampled, what it earned, and how likely it is; the first token of a prompt is its row."""

    def _generate(self, prompts):
        "Completions of token 1, with the end token 0 last in those that ended."
        shape = zip(self.batch['completion_mask'].sum(1).tolist(), self.batch['ended'].tolist(), strict=True)
        completions = [[1] * (length - ended) + [0] * ended for length, ended in shape]
        return [[row] for row in range(len(prompts))], completions, None, [''] * len(prompts), None, {}, None, []

    def _calculate_rewards(self, *_):  # TRL's own would round them to fp32
        return self.batch['rewards'].unsqueeze(1)

    def _get_per_token_logps_and_entropies(self, model, input_ids, _, width, compute_entropy=False, **__):
        rows, policy = input_ids[:, 0], 'logprobs' if compute_entropy else 'old_logprobs'  # only the loss asks for entropy
        if compute_entropy: self.seen.append(rows)
        table = self.batch['ref_logprobs' if model is self.ref_model else policy]
        return table[rows][:, :width], self.batch['entropy'][rows][:, :width], None


@pytest.fixture(scope='module')
def trainer_of(tmp_path_factory):
    "A trainer of TRL, built as a user builds it, from the options of its GRPOConfig."
    folder = str(tmp_path_factory.mktemp('trl'))
    config = GPT2Config(vocab_size=2, n_positions=8, n_embd=2, n_layer=1, n_head=1, bos_token_id=0, eos_token_id=0)
    GPT2LMHeadModel(config).save_pretrained(folder)
    model = GPT2LMHeadModel.from_pretrained(folder)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel({'end': 0})), eos_token='end', pad_token='end')

    def build(rows=8, group_size=4, **options):
        args = trl.GRPOConfig(folder, use_cpu=True, bf16=False, report_to='none', num_generations=group_size,
                              per_device_train_batch_size=rows, max_completion_length=LONGEST, **options)
        trainer = ReplayTrainer(model, len, args, Dataset.from_dict({'prompt': ['']}), processing_class=tokenizer)
        trainer.model.train()
        trainer.current_gradient_accumulation_steps = args.gradient_accumulation_steps  # its training loop does this
        trainer.seen = []
        return trainer
    return build


@pytest.fixture(autouse=True)
def fp64_by_default():
    "TRL's std multiplies by n / (n - 1) in the default precision: 1e-8 off if that is fp32."
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def make_batch(seed, rows=8, columns=7, spread=.4):
    "A random batch (fp64): ragged, off-policy, with rewards of few levels so that some groups tie."
    rng = torch.Generator().manual_seed(seed)
    logprobs = -3 * torch.rand(rows, columns, generator=rng, dtype=torch.float64)
    old, ref = logprobs + spread * torch.randn(2, rows, columns, generator=rng, dtype=torch.float64)
    lengths = torch.randint(1, columns + 1, (rows, 1), generator=rng)
    lengths[seed % rows] = columns  # somebody fills the width
    return dict(logprobs=logprobs, old_logprobs=old, ref_logprobs=ref, completion_mask=torch.arange(columns) < lengths,
                advantages=torch.randn(rows, generator=rng, dtype=torch.float64),
                entropy=torch.rand(rows, columns, generator=rng, dtype=torch.float64),
                ended=torch.rand(rows, generator=rng) < .5,
                rewards=.37 * torch.randint(0, 4, (rows,), generator=rng).double() - .3)


def with_leaves(batch):
    "The batch with fresh log-probabilities and entropies that take gradients."
    return batch | {name: batch[name].clone().requires_grad_() for name in ('logprobs', 'entropy')}


def gradients(loss, batch):
    return torch.autograd.grad(loss, [batch['logprobs'], batch['entropy']], allow_unused=True, materialize_grads=True)


def inputs_of(batch):
    "The batch as TRL hands it from sampling to its loss."
    mask, rows = batch['completion_mask'], torch.arange(len(batch['logprobs']))[:, None]
    return dict(prompt_ids=rows, prompt_mask=torch.ones_like(rows), completion_ids=mask.long(), completion_mask=mask.long(),
                advantages=batch['advantages'], old_per_token_logps=batch['old_logprobs'], num_items_in_batch=mask.sum(),
                ref_per_token_logps=batch['ref_logprobs'])


def trl_loss(trainer, batch, inputs=None):
    "TRL's loss of one batch, its gradients, and its metrics."
    trainer.batch, inputs = with_leaves(batch), inputs_of(batch) if inputs is None else inputs
    trainer._metrics['train'].clear()
    loss = trainer.compute_loss(trainer.model, inputs)
    return loss.detach(), gradients(loss, trainer.batch), {name: values[-1] for name, values in trainer._metrics['train'].items()}


def our_loss(batch, rows=slice(None), **options):
    "Our loss of some rows of a batch, its gradients in the whole batch, and its metrics."
    batch = with_leaves(batch)
    loss, metrics = grpo_loss(**{name: batch[name][rows] for name in TABLES}, **options, max_completion_length=LONGEST)
    return loss.detach(), gradients(loss, batch), metrics


def both_ways(loss_type, level, clip=(.1, .25), kl=(.3, True)):
    "The same options, as TRL names them and as we do."
    (low, high), (beta, corrected) = clip, kl
    theirs = dict(loss_type=loss_type, importance_sampling_level=level, epsilon=low, epsilon_high=high, beta=beta,
                  use_bias_correction_kl=corrected)
    ours = dict(loss_type=loss_type, importance_level=level, clip_low=low, clip_high=low if high is None else high, kl_coef=beta,
                kl_unbiased=corrected, kl_estimator='kl3')
    return theirs, ours


def assert_parity(theirs, ours):
    "Loss and gradients are the same to 1e-9."
    assert_close(ours[0], theirs[0], **EXACT)
    for mine, other in zip(ours[1], theirs[1], strict=True): assert_close(mine, other, **EXACT)


def assert_metrics(theirs, ours, clip_share=1.):
    "The metrics are the same, to what TRL's counting in fp32 allows."
    for name in METRICS:
        share = clip_share if name.startswith('clip') else 1.
        assert ours[2][name] * share == pytest.approx(theirs[2][name], abs=1e-6), name
    if 'kl' in theirs[2]: assert ours[2]['kl'] == pytest.approx(theirs[2]['kl'], abs=1e-9)


LOSSES = pytest.mark.parametrize('loss_type', LOSS_TYPES)
LEVELS = pytest.mark.parametrize('level', IMPORTANCE_LEVELS)


# ---------------------------------------------------------------- one batch

@pytest.mark.parametrize('clip, kl', list(itertools.product(CLIPS, KL)))
@LEVELS
@LOSSES
def test_loss_gradient_and_metrics(trainer_of, loss_type, level, clip, kl):
    their_options, our_options = both_ways(loss_type, level, clip, kl)
    trainer = trainer_of(**their_options)
    for seed in range(4):
        batch = make_batch(seed, rows=4 + 2 * seed, columns=4 + seed)
        theirs, ours = trl_loss(trainer, batch), our_loss(batch, **our_options)
        assert_parity(theirs, ours)
        assert_metrics(theirs, ours)
        assert ours[1][0].abs().max() > .01 and ('kl' in theirs[2]) == bool(kl[0])


def test_the_batches_clip_on_both_sides():
    for low, high in CLIPS:
        metrics = [our_loss(make_batch(seed), clip_low=low, clip_high=high or low)[2] for seed in range(4)]
        assert min(max(row[name] for row in metrics) for name in METRICS[:2]) > .05


@LEVELS
@LOSSES
def test_on_policy_and_an_advantage_for_each_token(trainer_of, loss_type, level):
    their_options, our_options = both_ways(loss_type, level)
    trainer, batch = trainer_of(**their_options), make_batch(5)
    inputs = inputs_of(batch)
    del inputs['old_per_token_logps']  # TRL then takes the policy's own, without gradient
    assert_parity(trl_loss(trainer, batch, inputs), our_loss(batch | dict(old_logprobs=batch['logprobs']), **our_options))
    batch['advantages'] = torch.randn(8, 7, generator=torch.Generator().manual_seed(6), dtype=torch.float64)
    assert_parity(trl_loss(trainer, batch), our_loss(batch, **our_options))


@LOSSES
def test_the_entropy_bonus(trainer_of, loss_type):
    their_options, our_options = both_ways(loss_type, 'token')
    trainer, batch = trainer_of(**their_options, entropy_coef=.05), make_batch(7)
    theirs, mask = trl_loss(trainer, batch), batch['completion_mask']
    if loss_type in ('bnpo', 'dapo'): return assert_parity(theirs, our_loss(batch, **our_options, entropy_coef=.05))
    # TRL's bonus is a mean over tokens whatever the loss; ours is averaged as the loss is, so grpo and dr_grpo differ
    without, bonus = our_loss(batch, **our_options), our_loss(batch, **our_options | dict(loss_type='dapo'), entropy_coef=.05)
    assert_close(theirs[0], without[0] - .05 * batch['entropy'][mask].mean(), **EXACT)
    assert_close(theirs[1][0], without[1][0], **EXACT)
    assert_close(theirs[1][1], bonus[1][1], **EXACT)
    assert (our_loss(batch, **our_options, entropy_coef=.05)[0] - theirs[0]).abs() > 1e-4


# ---------------------------------------------------------------- from rewards to the step

def rows_for(batch): return [{'prompt': ''}] * len(batch['rewards'])


@pytest.mark.parametrize('group_size', [2, 4, 8])
@pytest.mark.parametrize('scale', REWARD_SCALES)
def test_advantages(trainer_of, scale, group_size):
    trainer = trainer_of(rows=16, group_size=group_size, scale_rewards=scale)
    for seed in range(6):
        batch, tied = make_batch(seed, rows=16), seed % 2 == 0
        batch['rewards'][:group_size] = .1 if tied else batch['entropy'][:group_size, 0]
        trainer.batch = batch
        scored = trainer._generate_and_score_completions(rows_for(batch))['advantages']
        ours = compute_advantages(batch['rewards'], group_size, 'group_mean', scale)
        assert_close(ours, scored, **EXACT)
        assert ours.abs().max() > .1 and bool((ours[:group_size] == 0).all()) == tied


@LEVELS
@LOSSES
def test_masking_truncated_completions_is_our_mask(trainer_of, loss_type, level):
    their_options, our_options = both_ways(loss_type, level)
    trainer = trainer_of(**their_options, mask_truncated_completions=True, num_iterations=2)
    for seed, ended in itertools.product(range(4), ('some', 'none')):
        batch = make_batch(seed)
        if ended == 'none': batch['ended'][:] = False
        trainer.batch = batch
        scored = trainer._generate_and_score_completions(rows_for(batch))
        batch['completion_mask'] = batch['completion_mask'] & batch['ended'][:, None]
        batch['advantages'] = compute_advantages(batch['rewards'], 4)  # the truncated ones count here, on both sides
        assert torch.equal(scored['completion_mask'].bool(), batch['completion_mask'])
        theirs, ours = trl_loss(trainer, batch, scored), our_loss(batch, **our_options)
        assert_parity(theirs, ours)
        # per sequence, TRL's share of clipped ratios is one of all rows, ours of those with a trained token
        assert_metrics(theirs, ours, 1. if level == 'token' else batch['completion_mask'].any(1).double().mean().item())
        assert bool(ours[0]) == (ended == 'some')


def run_steps(trainer, batch, count):
    "Let TRL score a batch, shuffle it, cut it into micro-batches and go backward through `count` of them."
    trainer.batch = with_leaves(batch)
    losses = [trainer.training_step(trainer.model, rows_for(batch), None) for _ in range(count)]
    return losses, trainer.batch['logprobs'].grad


@LEVELS
@LOSSES
def test_a_step_of_micro_batches(trainer_of, loss_type, level):
    their_options, our_options = both_ways(loss_type, level)
    # two iterations, because TRL keeps the old log-probabilities only where it needs them
    trainer = trainer_of(**their_options, rows=4, gradient_accumulation_steps=2, num_iterations=2)
    batch = make_batch(11)
    batch['rewards'] = batch['entropy'][:, 0]
    losses, gradient = run_steps(trainer, batch, 2)
    batch['advantages'] = compute_advantages(batch['rewards'], 4)
    whole = our_loss(batch, **our_options)
    if loss_type == 'bnpo':  # TRL averages each micro-batch over its own tokens, then the micro-batches; we do not cut
        assert (sum(losses) - whole[0]).abs() > 1e-4
        pieces = [our_loss(batch, rows, **our_options) for rows in trainer.seen]
        whole = sum(piece[0] for piece in pieces) / 2, [sum(piece[1][0] for piece in pieces) / 2]
    assert len(set(torch.cat(trainer.seen).tolist())) == 8
    assert_parity((sum(losses), [gradient]), (whole[0], whole[1][:1]))


@LOSSES
def test_two_steps_of_one_generation_batch(trainer_of, loss_type):
    their_options, our_options = both_ways(loss_type, 'token')
    trainer, batch = trainer_of(**their_options, rows=4, steps_per_generation=2), make_batch(12)
    batch['rewards'] = batch['entropy'][:, 0]
    losses, gradient = run_steps(trainer, batch, 2)
    batch['advantages'] = compute_advantages(batch['rewards'], 4)
    # TRL's dapo divides each step by the mean tokens of the steps; ours by those of the step, unless told
    items = batch['completion_mask'].sum() / 2 if loss_type == 'dapo' else None
    pieces = [our_loss(batch, rows, **our_options, num_items=items) for rows in trainer.seen]
    for theirs, ours in zip(losses, pieces, strict=True): assert_close(ours[0], theirs, **EXACT)
    assert_close(sum(piece[1][0] for piece in pieces), gradient, **EXACT)
    if loss_type == 'dapo': assert (our_loss(batch, trainer.seen[0], **our_options)[0] - losses[0]).abs() > 1e-4


def test_the_column_of_trl_in_the_table_of_settings_is_what_is_installed():
    notebook = json.loads((Path(__file__).parent.parent/'nbs'/'19_trainer.ipynb').read_text(encoding='utf-8'))
    text = next(text for cell in notebook['cells'] if '| the paper |' in (text := ''.join(cell['source'])))
    rows = {row[0]: row[2] for line in text.splitlines() if line.startswith('|') for row in [[cell.strip() for cell in line.strip('|').split('|')]]}
    config = trl.GRPOConfig
    assert rows[''] == f'TRL {".".join(trl.__version__.split(".")[:2])}'
    for label, name in (('weight of the KL', 'beta'), ('highest learning rate', 'learning_rate'), ('updates on a batch', 'num_iterations'),
                        ('answers to a prompt', 'num_generations'), ('temperature of sampling', 'temperature')):
        assert float(rows[label]) == getattr(config, name), name
    assert config.scale_rewards in rows['an advantage is divided by the spread of'] and config.loss_type in rows['the loss is averaged over']
    assert config.use_bias_correction_kl and rows['gradient of the KL term'] == 'that of the KL itself'
