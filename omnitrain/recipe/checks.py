"""A recipe against what is known of its rows without opening them: the summaries that `prepare` writes beside them."""

from omnitrain.errors import RecipeError
from omnitrain.recipe.rows import summary_counts
from omnitrain.recipe.schema import Recipe


def check_rows(recipe: Recipe) -> None:
    """RecipeError for sources or modalities that do not fit the rows. Where a summary is missing the ranks will say."""
    train = [file.path for file in recipe.data.train_files]
    if recipe.algorithm.online:
        sources = summary_counts([*train, *recipe.data.validation_files], "sources")
        _check_sources(recipe, sources)
    elif recipe.data.batches == "modality":
        _check_modalities(recipe, summary_counts(train, "modalities"))


def check_profile(recipe: Recipe, steps: int | None) -> None:
    """RecipeError for a step to profile that comes after the run's end."""
    late = [step for step in recipe.profile.steps if steps is not None and step > steps] if recipe.profile else []
    if late:
        raise RecipeError(
            f"profile.steps = {recipe.profile.steps}: the run ends with step {steps}, before step {late[0]}; name an "
            "earlier one"
        )


def _check_sources(recipe: Recipe, held: dict[str, int] | None) -> None:
    if held is None:
        return
    for index, reward in enumerate(recipe.rewards):
        for source in reward.sources or ():
            if source not in held:
                raise RecipeError(
                    f'rewards[{index}].sources: no row has the source "{source}"; they have {", ".join(sorted(held))}'
                )
    for source in sorted(held):
        if all(reward.sources is not None and source not in reward.sources for reward in recipe.rewards):
            raise RecipeError(
                f'rewards[0].sources: no reward scores the rows of source "{source}"; add it to a rewards[].sources, '
                "or leave sources out of one"
            )


def _check_modalities(recipe: Recipe, held: dict[str, int] | None) -> None:
    if held is None:
        return
    wanted, needed = recipe.data.modality_weights or held, recipe.train.prompts_per_step
    for modality in sorted(wanted):
        if modality not in held:
            raise RecipeError(
                f"data.modality_weights names {modality}, which no training row is of; there are "
                f"{', '.join(sorted(held))}"
            )
        if held[modality] < needed:
            raise RecipeError(
                f'data.batches = "modality": {modality} has {held[modality]} training rows, fewer than '
                f"train.prompts_per_step = {needed}; prepare more of them, lower train.prompts_per_step, or name only "
                "the other modalities in data.modality_weights"
            )
