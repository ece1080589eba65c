"Configurations of runs that take a second or two; what the tests of the parts and those of the run share."
import atexit
import shutil
import tempfile
from pathlib import Path

import torch

from rookworld_nb.config import BY_SIZE, TrainConfig
from rookworld_nb.model import GPT, GPTConfig
from rookworld_nb.weights import load_tokenizer, model_folder, save_pretrained


def small_model() -> str:
    "A folder, for this process, with a random model of one layer that has nano's tokenizer: a run in a third of the time."
    folder, tokenizer = Path(tempfile.mkdtemp()), load_tokenizer(model_folder('nano'))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return str(save_pretrained(GPT(GPTConfig(1, 2, 16, tokenizer.get_vocab_size(), 256)), tokenizer, folder/'model'))


SHORT = TrainConfig(kl_coef=.02, mix_env_ratio=.2, replays=2, steps=4, batch_positions=5, group_size=4, eval_policy=6, eval_env=3, eval_samples=2, save_every=2, warmup_steps=1,
                    max_positions=60, temperature=.7, device='cpu')

RATE = BY_SIZE['small']['lr']
TINY = TrainConfig(model=small_model(), steps=6, replays=2, batch_positions=3, group_size=3, minibatch_positions=2, buffer_capacity=2, mix_env_ratio=.4, eval_policy=0, eval_env=0,
                   save_every=2, warmup_steps=2, max_new_tokens=20, baseline_type='ema', kl_control='adaptive', normalize_rewards=True,
                   max_positions=60, reward_warmup_steps=4, answer_coef=.5, answer_positions=3, device='cpu')

CLOCKS = 'time', 'step_time', 'perf/'    # what no two runs have in common


def without_clocks(row: dict) -> dict:
    "A row of metrics, but for what a clock or the machine has measured."
    return {name: value for name, value in row.items() if not name.startswith(CLOCKS)}
