"""Reads the settings file of a sweep and makes a list of runs. scripts/sweeps/sweep.py describes the
file.

A run is identified by its *key*: the options that decide its result, normalised, so that a finished
run is recognised whatever settings file asked for it. The key leaves out where files are, how many
threads compute, what is logged, and options that have their default value.
"""
import difflib
import functools
import glob
import hashlib
import itertools
import json
import os
import re
import shlex
import subprocess
import typing


class SettingsError(Exception):
    """The message is one line: what is wrong, where, and what was expected."""


# ---- options of train_llama2 ----------------------------------------------------------------

# Old results were measured before these options existed or had their present defaults, in effect with
# these values, which are those of --plain. Their keys leave the option out.
EARLIER = {"lead": "off", "carry": "0", "repair": "0", "repair-budget": "0"}


class Option(typing.NamedTuple):
    """A line of the program's table of options (llmc/options/options_table.h)."""
    group: str
    argument: str  # "": it takes none
    default: str  # "": none, or it follows from other options
    marks: frozenset


def read_options(program):
    """Reads {name: Option} from --help table."""
    try:
        text = subprocess.run([program, "--help", "table"], capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError) as error:
        raise SettingsError(f"'{program} --help table' failed ({error}); build it with make") from None
    lines = (line.split("\t") for line in text.splitlines())
    options = {name: Option(group, argument, default, frozenset(marks.split()))
               for name, group, argument, default, marks in lines}
    options["rule"] = Option("Loss", "NAME", "none", frozenset())  # others/NAME.c, for --rule
    options["name"] = Option("Output", "NAME", "", frozenset({"neutral"}))  # what tables and plots call an arm
    return options


def plain(value):
    """Converts text to a number where it is one, so that 0.10 and 1e-1 are the same value."""
    try:
        number = float(value)
    except (TypeError, ValueError):
        return value
    return int(number) if number.is_integer() and abs(number) < 2**53 else number


@functools.cache
def fingerprint(pattern):
    """A digest of token files that does not depend on their folder: of the names, the sizes and the
    first MiB of the first file."""
    paths = sorted(glob.glob(pattern))
    if not paths:
        raise SettingsError(f"there is no file '{pattern}'")
    digest = hashlib.sha256()
    for path in paths:
        digest.update(f"{os.path.basename(path)} {os.path.getsize(path)}\n".encode())
    with open(paths[0], "rb") as file:
        digest.update(file.read(1 << 20))
    return f"{os.path.basename(paths[0])} {digest.hexdigest()[:12]}"


@functools.cache
def samples(pattern):
    """A digest of 64 places of each token file. (That of keys looks at the beginning of the first file alone.)"""
    digest = hashlib.sha256()
    for path in sorted(glob.glob(pattern)):
        size = os.path.getsize(path)
        with open(path, "rb") as file:
            for place in range(64):
                file.seek(size * place // 64)
                digest.update(file.read(min(1 << 16, size // 64 + 1)))
    return digest.hexdigest()[:12]


@functools.cache
def contents(path):
    """A digest of what a file, or a model's directory, has. Of large files it takes the size, the first and the last
    MiB."""
    digest = hashlib.sha256()
    names = sorted(os.listdir(path)) if os.path.isdir(path) else [""]
    for one in (os.path.join(path, name) if name else path for name in names):
        if os.path.isdir(one):
            continue
        with open(one, "rb") as file:
            digest.update(f"{os.path.getsize(one)} ".encode() + file.read(1 << 20))
            file.seek(max(file.tell(), os.path.getsize(one) - (1 << 20)))
            digest.update(file.read())
    return digest.hexdigest()[:12]


def by_contents(name, value):
    """The value of an option in a key: a file stands there by what it has, since it may change and others may have its
    name. (Rules of others/ stand by their name.)"""
    kind, _, path = value.rpartition(":") if name == "loss-model" else ("", "", value)
    if name == "loss-model" and kind in ("trace", "replay"):
        paths = [path] if os.path.exists(path) else sorted(glob.glob(glob.escape(path) + ".[0-9]*"))
        return f"{kind}:" + " ".join(contents(one) for one in paths) if paths else value
    if (name == "model" or name == "rule" and value.endswith(".c")) and os.path.exists(path):
        return f"{os.path.basename(os.path.normpath(path))} {contents(path)}"
    return os.path.basename(os.path.normpath(value)) if name == "model" and "/" in value else value


# ---- runs -----------------------------------------------------------------------------------

class Run:
    """One training run of a section, with one value of each axis."""

    def __init__(self, section, options, start):
        self.section, self.options, self.start = section, options, start
        self.key = self.id = self.baseline = None
        self.also = []  # more bases: the run is compared with the geometric mean of all

    def value(self, name, default="0"):
        return self.options.get(name, default)

    def rates(self):
        """The loss rates of the settings: gradient, parameter."""
        if self.options.get("algorithm") == "reliable":
            return 0.0, 0.0
        gradient, _, parameter = self.value("loss-rate").partition(",")
        return float(gradient), float(parameter or gradient)

    def data(self):
        """Digests of the data as it is now."""
        return [samples(self.options[name]) for name in ("train", "val") if name in self.options]

    def arm(self):
        """The name that the settings file gives this arm of the comparison; "": none."""
        return self.value("name", "").replace("_", " ")

    def dropped(self):
        """The share of packets that the settings drop, mean over links: gradients, parameters. --loss-at gives
        some links rates of their own; those of tensors do not count here, the log has what was lost."""
        text, workers = self.value("loss-at", "none"), max(2, int(self.value("workers", "2")))
        if text == "none" or self.value("algorithm") == "reliable":
            return self.rates()
        rate = {(s, r): self.rates() for s in range(workers) for r in range(workers) if s != r}
        for entry in text.split(","):
            ends, _, rates = entry.partition("=")
            if ends[:1].isalpha() or "." in ends:
                continue
            sender, pair, receiver = ends.partition("-")
            gradient, _, parameter = rates.partition(":")
            for s, r in rate:
                to = sender in ("*", str(s)) and (receiver or "*") in ("*", str(r))
                back = not pair and sender in ("*", str(r))
                if to or back:
                    rate[s, r] = float(gradient), float(parameter or gradient)
        return tuple(sum(values) / len(rate) for values in zip(*rate.values()))

    def lossless(self):
        if self.value("wire-dtype", "auto") not in ("auto", "float32") and self.value("carry") not in ("auto", "0"):
            return False  # --carry adds back what rounding took away, without loss, too
        # A replay loses what its record says, whatever the rates.
        uneven = self.options.get("algorithm") != "reliable" and \
            (self.value("loss-at", "none") != "none" or self.value("loss-model").startswith("replay"))
        return self.rates() == (0, 0) and not uneven

    def wire_dtype(self):
        """The type on the wire; auto is what the program takes (lossynet/options.c)."""
        given, algorithm = self.value("wire-dtype", "auto"), self.value("algorithm", "lossy")
        small = self.value("plain", "no") != "yes" and algorithm in ("lossy", "reliable")
        return given if given != "auto" else "int6" if small else "float32"

    def nothing_goes_again(self):
        """Whether no packet is sent again, or as many as the settings say. Kept results of float32 then name none."""
        return self.value("algorithm", "lossy") != "lossy" or self.value("plain", "no") == "yes" or \
            self.value("repair", "auto") != "auto" or self.rates() == (0, 0)

    def identify(self, known):
        """Sets the key and the id, and the id of the run without loss to compare with."""
        key = {}
        for name, value in self.options.items():
            option = known[name]
            if "neutral" in option.marks or option.group == "Loss" or name in ("train", "val"):
                continue
            value = plain(by_contents(name, value))
            if value == "no" or value == plain(option.default) and option.default:
                continue
            if name != "wire-dtype":
                key[name] = value
        wire = self.wire_dtype()
        if wire != "float32" or not self.nothing_goes_again():
            key["wire-dtype"] = wire
        key["data"] = [fingerprint(self.options[name]) for name in ("train", "val")
                       if name in self.options]
        if self.start:
            key["start"] = self.start.id
            key.pop("model", None)
        algorithm = self.value("algorithm", "lossy")
        # Without loss, naive and lossy give the same bits as reliable.
        base = dict(key, algorithm=algorithm if algorithm == "rps" else "reliable")
        self.baseline = hash_of(base)
        if self.lossless():
            key = base
        else:
            gradient, parameter = self.rates()
            key["algorithm"] = algorithm
            options = dict(self.options)
            chosen = {"lead": "off", "carry": "0", "repair": "0"} if options.pop("plain", "no") == "yes" else \
                {name: known[name].default for name in EARLIER if name in known}
            if options.get("repair", "auto") != "auto":
                chosen.pop("repair-budget", None)  # --plain sets none, and a number of rounds means none
            options = {**(chosen if algorithm in ("lossy", "reliable") else {}), **options}
            for name, value in options.items():
                default, value = EARLIER.get(name, known[name].default), by_contents(name, value)
                if known[name].group != "Loss" or name in ("algorithm", "loss-rate"):
                    continue
                if value == "no":
                    continue
                if name == "repair" and value.count(",") == 1:  # kept results name the phases apart, as loss rates below
                    key["gradient-repair"], key["parameter-repair"] = map(plain, value.split(","))
                    continue
                if name == "loss-seed" and plain(value) == plain(self.value("seed", "1")):
                    continue
                if not default or plain(value) != plain(default):
                    key[name] = plain(value)
            if gradient == parameter:
                key["loss-rate"] = gradient
            else:
                key["gradient-loss-rate"], key["parameter-loss-rate"] = gradient, parameter
        self.key, self.id = key, hash_of(key)

    def command(self, program, known):
        words = [program]
        for name, value in sorted(self.options.items()):
            if name in ("rule", "name"):
                continue
            if not known[name].argument:
                words += [f"--{name}"] if value == "yes" else []
            elif not (self.start and name == "model"):
                words += [f"--{name}", value]
        return words

    def tokens(self):
        """The number of tokens that the run trains on, as a measure of its work."""
        number = lambda name, default: float(self.value(name, default))
        return (number("steps", "1000") * max(1, number("workers", "1")) * number("batch", "8")
                * number("micro-batches", "1") * max(1, number("seq", "1024")))

    def label(self):
        """The text that distinguishes the run from others of its section, without the seed."""
        gradient, parameter = self.rates()
        algorithm = self.value("algorithm", "lossy")
        words = [] if algorithm in ("lossy", "reliable") else [algorithm]
        if self.lossless():
            words.append("no loss" if not words else "0%")
        elif gradient == parameter:
            words.append(f"{100 * gradient:g}%")
        elif parameter == 0:
            words.append(f"{100 * gradient:g}% gradient phase")
        elif gradient == 0:
            words.append(f"{100 * parameter:g}% parameter phase")
        else:
            words.append(f"{100 * gradient:g}% gradient, {100 * parameter:g}% parameter phase")
        if self.arm() and not self.lossless():
            words = [self.arm()] + (words if self.section.losses() > 1 else [])
        skip = {"seed", "algorithm", "loss-rate", *self.section.named}
        if self.section.named and self.section.losses() == 1:
            skip.add("loss-at")
        for name in self.section.varying:
            value = self.options.get(name)
            if name in skip or value is None:
                continue
            if self.lossless() and name in self.section.loss_options:
                continue
            if (name, value) == ("rule", "none"):
                continue
            words.append(f"{name} {value}" if value not in ("yes", "no") else
                         name if value == "yes" else "")
        return ", ".join(word for word in words if word)


def hash_of(key):
    return hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:12]


# ---- the file -------------------------------------------------------------------------------

class Section:
    def __init__(self, name, line):
        self.name, self.line = name, line
        self.title, self.start, self.order = name, None, 1
        self.against = []  # for each base: options of the run that another run is compared with
        self.axes = {}  # {tuple of names: list of tuples of values}
        self.varying, self.loss_options, self.runs = [], set(), []
        self.named = set()  # the options whose values are an arm with a name

    def losses(self):
        """How many kinds of loss the section compares."""
        return len({(run.rates(), run.value("loss-at", "none")) for run in self.runs if not run.lossless()})


class Settings:
    """A parsed settings file. `runs` has each key once, in the order in which the runs are to be done."""

    def __init__(self, path, program):
        self.path, self.prepare, self.launch, self.title = path, None, [], None
        self.known = read_options(program)
        self.name = os.path.splitext(os.path.basename(path))[0]
        self.common, self.sections = Section("", 0), []
        try:
            with open(path, encoding="utf-8-sig") as file:
                lines = file.read().splitlines()
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or "it is not UTF-8 text"
            if isinstance(error, FileNotFoundError):
                names = sorted(os.path.basename(name) for name in glob.glob(f"{os.path.dirname(__file__)}/settings/*"))
                reason += f"; expected a file, or one of {' '.join(name for name in names if '.' not in name)}"
            raise SettingsError(f"{path}: {reason}") from None
        for number, line in enumerate(lines, 1):
            self.read_line(number, line.split("#")[0].strip())
        if not self.sections:
            raise SettingsError(f"{path}: no section; a line such as '[steep]' begins one")
        self.runs = []

    def wrong(self, line, text):
        return SettingsError(f"{self.path}:{line}: {text}")

    def read_line(self, number, line):
        if not line:
            return
        if line.startswith("["):
            name = line[1:-1].strip()
            if not line.endswith("]") or not re.fullmatch(r"[\w ,-]+", name):
                raise self.wrong(number, f"expected a section's name in brackets, got '{line}'")
            if any(section.name == name for section in self.sections):
                raise self.wrong(number, f"there is a section [{name}] already")
            self.sections.append(Section(name, number))
            return
        name, equals, value = (part.strip() for part in line.partition("="))
        if not equals or not name or not value:
            raise self.wrong(number, f"expected 'option = value value ...', got '{line}'")
        section = self.sections[-1] if self.sections else self.common
        if name in ("prepare", "launch"):
            if section is not self.common:
                raise self.wrong(number, f"'{name}' belongs before the first section")
            try:
                setattr(self, name, shlex.split(value))
            except ValueError as error:
                raise self.wrong(number, f"'{name}': {str(error).lower()} in '{value}'") from None
        elif name == "title":
            section.title = value
        elif name == "start":
            section.start = value
        elif name == "against":
            if section.against:
                raise self.wrong(number, f"a second 'against', '{value}': expected one, OPTION=VALUE ... [and OPTION=VALUE ...]")
            for words in f" {value} ".split(" and "):
                section.against.append({})
                for word in words.split() or [""]:
                    one, equals, against = word.partition("=")
                    if not equals or one not in self.known:
                        raise self.wrong(number, f"against has '{word}', expected OPTION=VALUE ... [and OPTION=VALUE ...]")
                    section.against[-1][one] = against
        elif name == "order":
            if not value.isdigit():
                raise self.wrong(number, f"order is '{value}', expected a whole number")
            section.order = int(value)
        else:
            self.read_axis(number, section, name, value.split())

    def read_axis(self, number, section, name, values):
        names = tuple(name.split("/"))
        for one in names:
            if one not in self.known:
                near = difflib.get_close_matches(one, list(self.known) + ["prepare", "launch"], 1)
                raise self.wrong(number, f"train_llama2 has no option '--{one}'"
                                 + (f"; '{near[0]}' perhaps" if near else ""))
            if "sweeps" in self.known[one].marks:
                raise self.wrong(number, f"'{one}' is the sweep's own to set")
            if any(one in others for others in section.axes):
                raise self.wrong(number, f"'{one}' is set already in this section")
        rows = [tuple(value.split("/")) if len(names) > 1 else (value,) for value in values]
        for row in rows:
            if len(row) != len(names):
                raise self.wrong(number, f"'{'/'.join(row)}' gives {len(row)} values for "
                                 f"{len(names)} options" + ("; '/' separates them: expected a file without a "
                                                            "folder" if len(row) > len(names) else ""))
            for one, value in zip(names, row):
                if not self.known[one].argument and value not in ("yes", "no"):
                    raise self.wrong(number, f"'{one}' is '{value}', expected yes or no")
        section.axes[names] = rows

    def expand(self):
        """Makes the list of runs. The data files must exist, because keys contain their digest."""
        for section in self.sections:
            axes = dict(section.axes)
            taken = {name for names in axes for name in names}
            for names, rows in self.common.axes.items():
                if not taken.intersection(names):
                    axes[names] = rows
                elif not taken.issuperset(names):
                    raise self.wrong(section.line, f"[{section.name}] sets a part of "
                                     f"'{'/'.join(names)}' only")
            for needed in ("train", "val", "steps", "model"):
                if not any(needed in names for names in axes) and not (section.start and
                                                                       needed == "model"):
                    raise self.wrong(section.line, f"[{section.name}] has no '{needed}'")
            section.varying = [name for names, rows in axes.items() if len(rows) > 1
                               for name in names]
            section.named = {name for names in axes if "name" in names for name in names}
            section.loss_options = {name for name, option in self.known.items() if option.group == "Loss"}
            start = self.start_of(section)
            for values in itertools.product(*axes.values()):
                options = {name: value for names, row in zip(axes, values)
                           for name, value in zip(names, row)}
                run = Run(section, options, start)
                try:
                    run.identify(self.known)
                except ValueError:
                    raise self.wrong(section.line, f"[{section.name}] loss-rate '{run.value('loss-rate')}': expected a "
                                     "number from 0 to 1, or two with a comma") from None
                except OSError as error:
                    raise self.wrong(section.line, f"[{section.name}] {error.filename}: {error.strerror}") from None
                section.runs.append(run)
            self.compare(section)
            self.tell_apart(section)
        self.schedule()

    def compare(self, section):
        """Sets baselines where the section has `against`: a run's bases are then the runs that have
        the values of `against` and otherwise the same options. A second base is compared with the first."""
        common = self.common.against[0] if self.common.against else {}
        bases = [{**common, **own} for own in section.against] or self.common.against
        for run in section.runs:
            found = []
            for against in bases:
                wanted = {**run.options, **against}
                same = [other.id for other in section.runs if other.options == wanted]
                if not same:
                    options = ", ".join(f"{name} {value}" for name, value in against.items())
                    raise self.wrong(section.line, f"[{section.name}] has no run with {options} to "
                                     f"compare '{run.label()}' with")
                found += same[:1]
            if found:
                run.baseline, *run.also = found
            if run.id in found:
                run.also = []

    def tell_apart(self, section):
        """Refuses runs that differ and that tables would take for seeds of one row. (Runs without loss share one: each
        other run is compared with its own.)"""
        seen = {}
        for run in (run for run in section.runs if not run.lossless()):
            other = seen.setdefault((run.label(), plain(run.value("seed", "1"))), run)
            if other.id != run.id:
                differ = ", ".join(f"{name} {other.options[name]} and {value}" for name, value in run.options.items()
                                   if other.options[name] != value and name != "name")
                raise self.wrong(section.line, f"[{section.name}] has two runs of one name, '{run.label()}', and seed: "
                                 f"{differ}; expected a name for each (name/OPTION = ...)")

    def start_of(self, section):
        if not section.start:
            return None
        for other in self.sections:
            if other.name == section.start and other.runs:
                for run in other.runs:
                    if run.lossless():
                        return run
        raise self.wrong(section.line, f"[{section.name}] starts from '{section.start}', expected "
                         "an earlier section that has a run without loss")

    def schedule(self):
        """Sorts runs by order, seed and section. Runs that others start from come first. Equal runs
        become one."""
        ranked = []
        for number, section in enumerate(self.sections):
            seeds = list(dict.fromkeys(run.value("seed", "1") for run in section.runs))
            for place, run in enumerate(section.runs):
                ranked.append((section.order, seeds.index(run.value("seed", "1")), number,
                               not run.lossless(), place, run))
        seen = set()
        def add(run):
            if run.start:
                add(run.start)
            if run.id not in seen:
                seen.add(run.id)
                self.runs.append(run)
        for *_, run in sorted(ranked, key=lambda row: row[:-1]):
            add(run)
        for run in self.runs:
            if run.baseline not in seen:
                raise self.wrong(run.section.line, f"[{run.section.name}] has no run without loss "
                                 f"to compare '{run.label()}' with; {self.why_no_base(run)}")

    def why_no_base(self, run):
        """What makes the runs with loss rate 0 lose all the same, if there are some; else what to add."""
        zero = [other for other in run.section.runs if other.rates() == (0, 0)
                and other.value("seed", "1") == run.value("seed", "1")]
        at = next((other.value("loss-at") for other in zero if other.value("loss-at", "none") != "none"), None)
        if at:
            return f"with loss rate 0 it still loses by 'loss-at {at}': 'loss-rate/loss-at = 0/none 0/{at}' has both"
        if zero:
            return "with loss rate 0 its option 'carry' or 'loss-model' still changes the result: give it a run " \
                   "with --algorithm reliable"
        return "add 0 to its loss rates"

    def check(self, program):
        """Has the program check the options of every run with --dry-run, without training."""
        for run in self.runs:
            command = run.command(program, self.known) + ["--dry-run"]
            if run.start:
                command += ["--model", run.start.options["model"]]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                said = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
                raise self.wrong(run.section.line, f"[{run.section.name}] {run.label()}: {said}")
