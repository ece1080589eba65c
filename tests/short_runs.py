"Configurations of runs that take a second or two; what the tests of the parts and those of the run share."
from rookworld_nb.config import BY_SIZE, TrainConfig

SHORT = TrainConfig(kl_coef=.02, mix_env_ratio=.2, replays=2, steps=4, batch_positions=5, group_size=4, eval_policy=6, eval_env=3, eval_samples=2, save_every=2, warmup_steps=1,
                    max_positions=60, temperature=.7, device='cpu')

RATE = BY_SIZE['small']['lr']
TINY = TrainConfig(steps=6, replays=2, batch_positions=3, group_size=3, minibatch_positions=2, buffer_capacity=2, mix_env_ratio=.4, eval_policy=0, eval_env=0,
                   save_every=2, warmup_steps=2, max_new_tokens=20, baseline_type='ema', kl_control='adaptive', normalize_rewards=True,
                   max_positions=60, reward_warmup_steps=4, answer_coef=.5, answer_positions=3, device='cpu')
