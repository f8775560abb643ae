"""Builds rules that train_llama2 does not have for its option --rule: NAME is others/NAME.c, FILE.c any file."""
import os
import subprocess

from sweep_settings import SettingsError, contents

HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.dirname(os.path.dirname(HERE))


def object_of(rule):
    """Where the shared object of a rule is when it is built. Files of one name have each its own."""
    name = os.path.basename(rule).removesuffix(".c") + ("-" + contents(rule) if rule.endswith(".c") else "")
    return os.path.join(ROOT, "build", "others", name + ".so")


def build_rule(rule):
    source = rule if rule.endswith(".c") else os.path.join(HERE, "others", rule + ".c")
    if not os.path.exists(source):
        raise SettingsError(f"rule '{rule}': there is no file '{os.path.relpath(source)}'")
    os.makedirs(os.path.dirname(object_of(rule)), exist_ok=True)
    done = subprocess.run([os.environ.get("CC", "cc"), "-O3", "-Wall", "-Wextra", "-shared", "-fPIC", "-I", ROOT, "-I",
                           os.path.join(ROOT, "lossynet"), source, "-o", object_of(rule), "-lm"],
                          text=True, capture_output=True, check=False)
    if done.returncode:
        lines = done.stderr.strip().splitlines() or ["no reason given"]
        said = next((line for line in lines if "error" in line), lines[-1])  # the last one may point with ^~~
        raise SettingsError(f"rule '{rule}' does not build: {said}")
