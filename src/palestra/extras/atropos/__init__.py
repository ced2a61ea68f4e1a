"""Training over HTTP: environments in other programs post scored groups, and a trainer takes them."""

from palestra.core.config_sections import NEW_TOKENS, STEP_GROUP_SIZE, STEP_PROBLEMS

# Environments filter their groups, and choose the temperature, by themselves. Both sides must agree on the
# sizes of a step, and only the trainer knows the model, so these are not automatic.
WIRE_DEFAULTS = {
    "train.filter_equal_groups": False,
    "train.problems_per_step": STEP_PROBLEMS,
    "rollout.group_size": STEP_GROUP_SIZE,
    "rollout.max_new_tokens": NEW_TOKENS,
    "rollout.temperature": 1.0,
}
