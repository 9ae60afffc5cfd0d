"""The command line of every job: a recipe, dotted overrides, --help with every field, --dry-run, and the exit codes."""

import json
import logging
import re
import sys
import typing
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from pipelines.paths import home, log_home
from workers.config import Settings
from workers.errors import InputError

EXIT_DONE, EXIT_FAILED, EXIT_BAD_INPUT, EXIT_TOO_MANY_BAD_ROWS = 0, 1, 2, 3
_RECIPES = Path(__file__).resolve().parent / "recipes"
_logger = logging.getLogger("marsray")
R = TypeVar("R", bound=Settings)


class _Loader(yaml.SafeLoader):
    """YAML in which `5e-6` is a number, as everybody who writes a learning rate expects."""


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$"), list("-+.0123456789")
)


def run(
    recipe_type: type[R], default_recipe: str | None, execute: Callable[[R, bool], int], argv: list[str] | None = None
) -> int:
    """Reads the command line, executes the job, and returns its exit code, which the last log line repeats.

    Args:
        recipe_type: the settings model of the job; its docstring heads the help.
        default_recipe: file in `jobs/recipes` that is read when `--config` is absent.
        execute: gets the recipe and whether this is a dry run.
    """
    arguments = sys.argv[1:] if argv is None else argv
    start_logging()
    try:
        if {"-h", "--help"} & set(arguments):
            sys.stdout.write(help_text(recipe_type, default_recipe))
            return EXIT_DONE
        recipe, is_dry_run = parse(recipe_type, default_recipe, arguments)
        log_home()
        if is_dry_run:
            sys.stdout.write(yaml.safe_dump(json.loads(recipe.model_dump_json()), sort_keys=False))
        code = execute(recipe, is_dry_run)
        if is_dry_run and code == EXIT_DONE:
            _logger.info(
                "dry run: settings, inputs, output and model folder are fine; nothing was written, no cluster looked at"
            )
    except InputError as error:
        _logger.error("error: %s", error)
        code = EXIT_BAD_INPUT
    except ModuleNotFoundError as error:
        _logger.error("error: %s has no module %r; run `source .venv/bin/activate` first", sys.executable, error.name)
        code = EXIT_FAILED
    except KeyboardInterrupt as stop:
        _logger.error("%s; the same command goes on", str(stop) or "interrupted")
        code = EXIT_FAILED
    except Exception:  # the border of the program: whatever happened, the log ends with the exit code
        _logger.exception("error: the job failed")
        code = EXIT_FAILED
    _logger.info("exit code %d", code)
    return code


def start_logging() -> None:
    """Plain lines with the time on standard error; results go to standard output."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S", stream=sys.stderr)
    for chatty in ("httpx", "filelock", "fsspec", "botocore"):
        logging.getLogger(chatty).setLevel(logging.WARNING)


def parse(recipe_type: type[R], default_recipe: str | None, arguments: list[str]) -> tuple[R, bool]:
    """Recipe and dry-run flag from the arguments.

    Raises:
        InputError: names the field, what was found and what is expected.
    """
    values: dict[str, Any] | None = None
    overrides: list[str] = []
    is_dry_run = False
    remaining = iter(arguments)
    for argument in remaining:
        if argument == "--dry-run":
            is_dry_run = True
        elif argument == "--config" or argument.startswith("--config="):
            values = _read_recipe(argument.partition("=")[2] or next(remaining, ""))
        elif argument.startswith("-") or "=" not in argument:
            expected = "--config FILE, --dry-run, --help or section.field=value"
            raise InputError("command line", repr(argument), expected, "Quote what has spaces.")
        else:
            overrides.append(argument)
    if values is None:
        values = _read_recipe(str(_RECIPES / default_recipe)) if default_recipe else {}
    for override in overrides:
        _apply(recipe_type, values, override)
    try:
        # JSON mode: strict about types, yet a list is a tuple and 1 is a float. Dates, which JSON does not know, become text.
        return recipe_type.model_validate_json(json.dumps(values, default=str)), is_dry_run
    except ValidationError as error:
        raise _readable(recipe_type, error) from None


def _read_recipe(name: str) -> dict[str, Any]:
    candidates = [Path(name), home() / name, _RECIPES / name]
    path = next((candidate for candidate in candidates if name and candidate.is_file()), None)
    if path is None:
        raise InputError("--config", repr(name), "a recipe file", f"Recipes are in {_RECIPES}.")
    try:
        values = yaml.load(path.read_text(), _Loader)
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise InputError(str(path), f"no valid YAML ({' '.join(str(error).split())})", "a YAML recipe") from error
    if not isinstance(values, dict | None):
        raise InputError(str(path), type(values).__name__, "sections with fields")
    return values or {}


def _apply(recipe_type: type[BaseModel], values: dict[str, Any], override: str) -> None:
    """Puts `section.field=value` into `values`; a single value for a list field becomes a list of one."""
    name, _, text = override.partition("=")
    *sections, field = name.split(".")
    model: type[BaseModel] | None = recipe_type
    for section in sections:
        model = _section_type(model, section) if model else None
        inner = values.get(section)
        values[section] = inner = dict(inner) if isinstance(inner, dict) else {}
        values = inner
    annotation = model.model_fields[field].annotation if model and field in model.model_fields else None
    is_list = typing.get_origin(annotation) is tuple
    # Text and a single item of a list stand as they are typed: a glob or a stop string is no YAML.
    if annotation is str or (annotation == str | None and text != "null"):
        value: Any = text
    elif is_list and not text.startswith("[") and _is_text(typing.get_args(annotation)[0]):
        value = [text]
    else:
        value = _yaml(name, text)
        value = [value] if is_list and not isinstance(value, list) and value is not None else value
    values[field] = value


def _yaml(name: str, text: str) -> Any:
    try:
        return yaml.load(text, _Loader)
    except yaml.YAMLError as error:
        raise InputError(
            name, repr(text), "a YAML value", "Quotes around an item keep it from being read as YAML."
        ) from error


def _is_text(annotation: Any) -> bool:
    return annotation is str or (
        typing.get_origin(annotation) is typing.Annotated and typing.get_args(annotation)[0] is str
    )


def _section_type(model: type[BaseModel], name: str) -> type[BaseModel] | None:
    if name not in model.model_fields:
        return None
    annotation = model.model_fields[name].annotation
    return next((a for a in (annotation, *typing.get_args(annotation)) if _is_settings(a)), None)


def _is_settings(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, Settings)


def _readable(recipe_type: type[BaseModel], error: ValidationError) -> InputError:
    """The first problem, in our form; the number of others is said."""
    first, *others = error.errors()
    where = _name_of(first)
    advice = "See --help." + (f" Also wrong: {', '.join(map(_name_of, others))}." if others else "")
    if first["type"] == "extra_forbidden":
        model: type[BaseModel] | None = recipe_type
        for part in first["loc"][:-1]:
            model = _section_type(model, str(part)) if model else None
        known = ", ".join(model.model_fields) if model else "a known field"
        return InputError(where, "an unknown field", f"one of {known}", advice)
    if first["type"] == "value_error":  # one of our own checks of several fields
        return InputError(where, first["msg"].removeprefix("Value error, "), "settings that fit together", advice)
    message = first["msg"]
    return InputError(where, json.dumps(first["input"], default=str)[:200], message[0].lower() + message[1:], advice)


def _name_of(problem: Any) -> str:
    return ".".join(str(part) for part in problem["loc"]) or "recipe"


def help_text(recipe_type: type[Settings], default_recipe: str | None) -> str:
    """Usage and every field with its type, default and meaning."""
    recipe, _ = parse(recipe_type, default_recipe, [])
    lines = [
        recipe_type.__doc__ or "",
        "",
        f"usage: {Path(sys.argv[0]).name} [--config recipe.yaml] [--dry-run] [section.field=value ...]",
        f"Without --config the defaults below apply{f' (jobs/recipes/{default_recipe})' if default_recipe else ''}.",
        "Exit codes: 0 done, 1 failed, 2 bad arguments or input, 3 finished but more rows failed than max_error_share allows.",
        "",
    ]
    for name, field, value in _fields(recipe, ""):
        lines.append(f"  {name} ({_type_name(field.annotation)}, default {json.dumps(value)})")
        lines.append(f"      {field.description}")
    return "\n".join(lines) + "\n"


def _fields(settings: Settings, prefix: str) -> Iterator[tuple[str, FieldInfo, Any]]:
    for name, field in type(settings).model_fields.items():
        value = getattr(settings, name)
        section = _section_type(type(settings), name)
        if section is None or value is None:
            yield f"{prefix}{name}", field, value
        if section is not None:  # of one that is left out by default, what its fields would be
            inner = value or section()
            assert isinstance(inner, Settings)
            yield from _fields(inner, f"{prefix}{name}.")


def _type_name(annotation: Any) -> str:
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        return _type_name(arguments[0])
    if origin is typing.Literal:
        return " | ".join(json.dumps(value) for value in arguments)
    if origin is dict:
        return "mapping"
    if _is_settings(annotation):
        return "section"
    if origin is tuple:
        return f"list of {_type_name(arguments[0])}" if arguments[-1] is ... else f"{len(arguments)} numbers"
    if arguments:
        return " | ".join(_type_name(argument) for argument in arguments)
    return {"NoneType": "null", "str": "text", "int": "integer", "float": "number", "bool": "true | false"}.get(
        annotation.__name__, annotation.__name__
    )
