"""Plan a model whose forward pass is not implemented yet, and refuse to export it by name.

    recipe = planned_only(open_checkpoint(path), None)       # None for a family that can be exported
"""

from __future__ import annotations

from dflash_core.errors import PlanError

from exporter.checkpoint import Checkpoint
from exporter.plan import PrecisionSettings, plan_precision, plan_table
from exporter.plan_report import PlanReport
from exporter.recipe import Recipe, find_recipe, load_recipe


def planned_only(target: Checkpoint, name_or_path: str | None) -> Recipe | None:
    """The recipe of a model that can be planned and not exported; None when the model can be exported, or is unknown.

    Args:
        name_or_path: the recipe that was asked for; None: by the architecture.
    Raises:
        RecipeError: as `load_recipe`.
    """
    if name_or_path is not None:
        recipe: Recipe | None = load_recipe(name_or_path)
    else:
        recipe = find_recipe(_architecture(target))
    return recipe if recipe is not None and not recipe.forward_implemented else None


def refuse_export(target: Checkpoint, recipe: Recipe) -> PlanError:
    """The refusal to export a family that can only be planned."""
    return PlanError(
        "FORWARD_NOT_IMPLEMENTED", f"the forward pass of {recipe.name} is not implemented: it can be planned only",
        where=f"{_architecture(target)} in {target.path}", hint="pass --plan to see what each precision setting does",
    )


def report_family(target: Checkpoint, recipe: Recipe, settings: PrecisionSettings, has_draft: bool) -> PlanReport:
    """The plan of such a model: weights by group, and no graphs.

    Raises:
        PlanError, RecipeError, CheckpointError: as `plan_precision`; PLAN_DRAFT with a draft, whose fit to the target
            only the target's forward pass can tell.
    """
    if has_draft:
        raise PlanError("PLAN_DRAFT", f"a draft cannot be planned with {recipe.name} yet", where="--draft",
                        hint="leave --draft out: no draft setting changes the target's plan")
    plan = plan_precision(target, recipe, None, None, settings)
    nbytes = sum(tensor.nbytes_after for tensor in plan.target)
    return PlanReport(plan, plan_table(plan), (), nbytes, None, None, recipe.name)


def _architecture(target: Checkpoint) -> str:
    names = target.config.get("architectures")
    return names[0] if isinstance(names, list) and names and isinstance(names[0], str) else ""
