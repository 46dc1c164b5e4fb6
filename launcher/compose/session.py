"""Hydra for the length of one command: compose, and hand over a typed configuration."""

from __future__ import annotations

import contextlib
import copy
import functools
import io
import logging
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from hydra import compose, initialize_config_dir
from hydra._internal import defaults_list as hydra_defaults
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.config_repository import ConfigRepository, IConfigRepository
from hydra._internal.defaults_list import Overrides
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.config_store import ConfigStore
from hydra.core.default_element import InputDefault, ResultDefault
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.object_type import ObjectType
from hydra.plugins.config_source import ConfigResult
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from launcher.compose.option_groups import conf_dir
from launcher.compose.overrides import listed_options, quote
from launcher.compose.used_checkpoint import use_checkpoint
from launcher.config import LaunchConfig, check, dump, from_dict
from launcher.config.check_training import HUGGING_FACE
from launcher.config.decode import CLASS, ENTRY_POINTS, KeyPlaceError, installed_names
from launcher.config.key import describe, free_keys, keys_of, shorten, spell, typed
from launcher.config.pipeline import HardwareConfig
from launcher.config.running import TrackerName
from launcher.secrets import refuse_secret
from strategies.errors import PipelineError, PlanError
from strategies.schedules.custom import NAME as CUSTOM

if TYPE_CHECKING:
    from hydra._internal.hydra import Hydra
    from hydra.conf import HydraConf

CONFIG_NAME = "config"


@contextlib.contextmanager
def hydra_session() -> Iterator[Hydra]:
    """Hydra, initialised on our ``conf/`` and cleared afterwards.

    Yields Hydra's application object, the one its own ``main`` decorator drives.
    """
    _store_schema()
    for group in ENTRY_POINTS:
        # What other distributions offer is chosen by name, as our own options are.
        for name in installed_names(group):
            ConfigStore.instance().store(
                group=group, name=name, node={"name": name}, provider="entry points"
            )
    GlobalHydra.instance().clear()
    with initialize_config_dir(config_dir=str(conf_dir()), job_name="foldpipe", version_base="1.3"):
        hydra = GlobalHydra.instance().hydra
        assert hydra is not None
        hydra.config_loader = _Loader(hydra.config_loader.get_search_path())
        yield hydra


@functools.cache
def _store_schema() -> None:
    # The schema's defaults lie beneath the YAML files, so that a user's file may be partial and
    # every key can still be overridden.
    defaults = dump(LaunchConfig()) | {"experiment_name": None}
    # A hardware file that names peaks per precision has no other unless it says so; for one without
    # any peak, to_config() has the declaration's.
    defaults["hardware"]["peak_flops"] = None
    schema = OmegaConf.create(defaults)
    for path in free_keys(LaunchConfig):
        OmegaConf.set_struct(OmegaConf.select(schema, path), False)  # any name goes there
    ConfigStore.instance().store(name="schema", node=schema, provider="foldpipe")


@dataclass(slots=True)
class _Kept:
    """What this process has read and merged, under all that it was made of.

    That is two thirds of composing, and the jobs of a sweep differ in little else than the words
    that are set into the same files. A process that composes once pays for no copy.
    """

    begun: bool = False  # with a first composition
    results: dict[object, ConfigResult] = field(default_factory=dict)
    merged: dict[object, tuple[list[ConfigResult | None], DictConfig]] = field(default_factory=dict)


@functools.cache
def _kept() -> _Kept:
    return _Kept()


_MOST_KEPT = 64


class _Repository(ConfigRepository):
    """Hydra's, which reads a file again only where it has changed."""

    def __deepcopy__(self, _: object) -> _Repository:
        other = object.__new__(_Repository)
        other.sources = list(self.sources)
        return other

    def load_config(self, config_path: str) -> ConfigResult | None:
        source = self._find_object_source(config_path, ObjectType.CONFIG)
        if source is None or not _kept().begun:
            return super().load_config(config_path)
        state = None
        if source.scheme() == "file":
            found = (Path(source.path) / source._normalize_file_name(config_path)).stat()
            state = found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns
        place = source.scheme(), source.provider, source.path, config_path, state
        kept = _kept().results
        if place not in kept:
            result = super().load_config(config_path)
            if result is None:
                return None
            kept[place] = result
        return kept[place]


_all_choices = hydra_defaults._create_interpolation_map


def _choices_where_needed(
    overrides: Overrides, defaults_list: list[InputDefault], self_added: bool
) -> DictConfig:
    # Hydra makes a tree of all choices for every file, an eighth of composing, and looks into it
    # where a default names another choice.
    if any(each.is_interpolation() for each in defaults_list):
        return _all_choices(overrides, defaults_list, self_added)
    return DictConfig({})


hydra_defaults._create_interpolation_map = _choices_where_needed


class _Loader(ConfigLoaderImpl):
    """Hydra's, which merges the same parts once."""

    def __init__(self, config_search_path: ConfigSearchPath) -> None:
        super().__init__(config_search_path)
        self.repository = _Repository(config_search_path)

    def _compose_config_from_defaults_list(
        self, defaults: list[ResultDefault], repo: IConfigRepository
    ) -> DictConfig:
        if not _kept().begun:
            _kept().begun = True
            return super()._compose_config_from_defaults_list(defaults, repo)
        results = [repo.load_config(str(each.config_path)) for each in defaults]
        places = [(each.config_path, each.package, each.primary) for each in defaults]
        key = (*map(id, results), *places)  # the results are kept alive beside what they make
        kept = _kept().merged
        if key not in kept:
            while len(kept) >= _MOST_KEPT:
                del kept[next(iter(kept))]
            # Merging moves parts from their results into the whole.
            own = copy.deepcopy(repo)
            kept[key] = results, super()._compose_config_from_defaults_list(defaults, own)
        return copy.deepcopy(kept[key][1])


def show_info(hydra: Hydra, what: str, overrides: Sequence[str], *, multirun: bool) -> None:
    """Hydra's ``--info``: where the configuration comes from, part by part."""
    root = logging.getLogger()  # to which Hydra adds a handler for what it says
    before = root.level, list(root.handlers)
    mode = RunMode.MULTIRUN if multirun else RunMode.RUN
    said = io.StringIO()
    try:
        with contextlib.redirect_stdout(said):
            hydra.show_info(what, CONFIG_NAME, list(overrides), mode)
    finally:
        root.setLevel(before[0])
        root.handlers = before[1]
    sys.stdout.write(said.getvalue())


def search_path(config_dir: Path | None) -> list[str]:
    """Overrides that make Hydra look into the user's folder, too."""
    if config_dir is None:
        return []
    location = quote("", f"file://{config_dir.resolve()}")[1:]
    return [f"hydra.searchpath=[{location}]"]


def compose_checked(overrides: Sequence[str]) -> tuple[LaunchConfig, DictConfig]:
    """Composes one job without starting it.

    Returns:
        The checked configuration, and Hydra's own node.

    Raises:
        PlanError: Whatever is wrong with it.
    """
    config, composed = compose_whole(overrides)
    return config, composed.hydra


def compose_whole(overrides: Sequence[str]) -> tuple[LaunchConfig, DictConfig]:
    """The same, with all that Hydra has composed."""
    try:
        composed = compose(CONFIG_NAME, overrides=list(overrides), return_hydra_config=True)
        HydraConfig.instance().set_config(composed)
        hydra = composed.hydra
        use_checkpoint(composed, hydra)
        try:
            config = to_config(composed, hydra)
        except KeyPlaceError as error:
            raise _text_of_a_variable(error, hydra) from error
        check(config)
        # Reading them now shows a mistake in a folder pattern before anything is created.
        for key in ("run", "sweep"):
            refuse_secret(f"hydra.{key}.dir", str(hydra[key].dir), place="the resolved folder")
    except PipelineError:
        raise
    except Exception as error:  # Hydra, OmegaConf and YAML raise a dozen unrelated types.
        raise PlanError(
            f"The configuration cannot be composed: {_reason(error, overrides)}"
        ) from error
    return config, composed


def _text_of_a_variable(error: KeyPlaceError, hydra: DictConfig) -> PlanError:
    """``pp=${oc.env:N}`` is a text, whatever the variable holds."""
    key = ".".join(error.path)
    words = OmegaConf.to_container(hydra.overrides.task, resolve=False)
    for word in map(str, words) if isinstance(words, list) else ():
        found = re.fullmatch(rf"\+*{re.escape(key)}=(\$\{{(oc\.env|now):[^{{}}]*\}})", word)
        if found:
            said = str(error).partition(". Try ")[0]
            fix = f"""'{key}="${{oc.decode:{found[1]}}}"'"""
            return PlanError(f"{said}, and what a variable holds is a text. Try {fix}.")
    return error


def to_config(composed: DictConfig, hydra: DictConfig | HydraConf) -> LaunchConfig:
    """A composed tree as a typed configuration, interpolations resolved."""
    values = {
        str(name): OmegaConf.to_container(node, resolve=True) if OmegaConf.is_config(node) else node
        for name, node in ((name, composed[name]) for name in composed if name != "hydra")
    }
    if values.get("experiment_name", "") is None:
        values["experiment_name"] = hydra.runtime.choices.get("experiment") or "default"
    _refuse_secrets(values, "")
    _several_trackers(values, hydra)
    _own_schedule(values, hydra)
    _refuse_other_label(values, hydra)
    hardware = values.get("hardware")
    if isinstance(hardware, dict) and all(hardware.get(name) is None for name in _PEAKS):
        hardware.pop("peak_flops", None)
    config = from_dict(values)
    return replace(config, hardware=_one_peak(config.hardware, hydra))


def _several_trackers(values: dict[str, Any], hydra: DictConfig | HydraConf) -> None:
    """Of ``tracking=[mine,wandb]`` Hydra keeps the last name only."""
    typed = _typed("tracking", hydra)
    options = listed_options("tracking", typed or "")
    if len(options) < 2 or _typed("tracking.name", hydra) is not None:
        return
    kept = [word for word in hydra.overrides.hydra if word.startswith("hydra.searchpath=")]
    known = get_args(TrackerName)
    names = [
        option
        if option in known
        else compose(CONFIG_NAME, overrides=[*kept, f"tracking={option}"]).tracking.name
        for option in options
    ]
    values["tracking"]["name"] = names


def _own_schedule(values: dict[str, Any], hydra: DictConfig | HydraConf) -> None:
    """An order by its path has that as its name."""
    schedule = values.get("schedule")
    path = schedule.get("path") if isinstance(schedule, dict) else None
    if not isinstance(schedule, dict) or not isinstance(path, str):
        return
    default, chosen = LaunchConfig().schedule.name, schedule["name"]
    if chosen not in (CUSTOM, path) and (chosen != default or _typed("schedule", hydra)):
        raise PlanError(
            f"schedule.path={path} is an order of your own, and schedule={chosen} another one. "
            f"Try schedule={CUSTOM} {typed('schedule.path', path)}."
        )
    schedule["name"] = path


def _refuse_other_label(values: dict[str, Any], hydra: DictConfig | HydraConf) -> None:
    """``model.name=llama2_7b`` would call the chosen model so, and leave its sizes as they are."""
    for group in ("model", "hardware"):
        node, choice = values.get(group), str(hydra.runtime.choices.get(group))
        name = node.get("name") if isinstance(node, dict) else None
        options = {file.stem for file in (conf_dir() / group).glob("*.yaml")}
        if choice not in options or name in (choice, CLASS, HUGGING_FACE):
            continue
        if group == "model" and re.fullmatch(r"[\w./-]+(\.py|:[A-Za-z_]\w*)", str(name)):
            raise PlanError(
                f"model.name={shorten(name)} would only be what model={choice} is called. "
                f"Try model={CLASS} {typed('model.path', name)}."
            )
        meant = sorted(o for o in options if f"{o}_".startswith(f"{str(name).lower()}_"))
        if meant:
            raise PlanError(
                f"{group}.name={name} would only be what {group}={choice} is called, with all "
                f"figures as they are. Try {' or '.join(f'{group}={each}' for each in meant[:3])}."
            )


def _typed(key: str, hydra: DictConfig | HydraConf) -> str | None:
    """The value that the command line gives a key; None where it does not."""
    for word in reversed(hydra.overrides.task):
        name, _, value = str(word).partition("=")
        if name.lstrip("+") == key:
            return value
    return None


_PEAKS = tuple(entry.name for entry in fields(HardwareConfig) if entry.name.startswith("peak_"))


def _one_peak(hardware: HardwareConfig, hydra: DictConfig | HydraConf) -> HardwareConfig:
    """With ``peak_flops`` set over a file that names peaks: it is meant for all of them."""
    if hardware.peak_flops is None or not hardware.named_peaks():
        return hardware
    # What the file itself says, without command line and experiment.
    kept = [word for word in hydra.overrides.hydra if word.startswith("hydra.searchpath=")]
    choice = f"hardware={hydra.runtime.choices['hardware']}"
    file = compose(CONFIG_NAME, overrides=[*kept, choice]).hardware
    if file.peak_flops is not None and float(file.peak_flops) == hardware.peak_flops:
        return hardware
    # Peaks that were set over the file, too, stay.
    same = [name for name in _PEAKS[1:] if file[name] is not None]
    dropped = [name for name in same if float(file[name]) == getattr(hardware, name)]
    none: dict[str, Any] = dict.fromkeys(dropped)
    return replace(hardware, **none)


def _refuse_secrets(value: object, path: str) -> None:
    """Looks at resolved values: an environment variable may have brought a credential in."""
    if isinstance(value, dict):
        for name, child in value.items():
            _refuse_secrets(child, f"{path}.{name}" if path else str(name))
    elif isinstance(value, list):
        for child in value:
            _refuse_secrets(child, path)
    elif isinstance(value, str):
        refuse_secret(path, value, place="the composed configuration")


def _reason(error: BaseException, words: Sequence[str]) -> str:
    """What is wrong in a sentence, and a way out; ``words``: the overrides."""
    if isinstance(error, RecursionError):
        return "it refers to itself, or is nested too deeply."
    cause = error.__cause__ or error.__context__
    text = str(error) or (str(cause) if cause else "") or type(error).__name__
    merged = text.startswith("Error merging override ")
    if merged and cause is not None:  # the word itself, which is said anyway
        text = str(cause)
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    kept = [
        line
        for line in lines
        if not line.startswith(("full_key:", "object_type=", "reference_type="))
    ]
    place = getattr(error, "full_key", None) or getattr(cause, "full_key", None)
    said = " ".join(kept).rstrip(".")[:400]
    if not place:
        return f"{said}. Try --help."
    word = next((word for word in reversed(words) if word.lstrip("+").startswith(f"{place}=")), "")
    value = word.partition("=")[2]
    if not word and "nterpolation" in said:  # in a file
        value = "${...}"
    return f"{place}: {said}.{_written_out(place, value) or ' Try --help.'}"


def _written_out(place: str, value: str) -> str:
    """What ``${`` means here, and the value without that meaning."""
    value = value.strip("'\"").replace("$\\{", "${")
    if "${" not in value:
        return ""
    entry = next((one for one in keys_of(LaunchConfig) if one.path == place), None)
    fix = typed(place, value.replace("\\${", "${").replace("${", "\\${")) + " for a text"
    if entry is not None and "text" not in describe(entry.hint):
        fix = f"{place}={spell(entry.example)}"
    return f" ${{KEY}} takes the value of another key, ${{oc.env:NAME}} of a variable. Try {fix}."
