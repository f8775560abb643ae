#!/usr/bin/env python3
"""Translates the PTX that nvcc makes of the kernels to C++ that dev/emulation runs (ptx_run.h).

    nvcc -ptx -arch=compute_90 ... -o kernels.90.ptx
    translate.py kernels.80.ptx kernels.90.ptx >kernels_ptx.cpp

Each .entry becomes a function of its parameters' bytes, each instruction a statement (instructions.py), each
label a label. Kernels of several targets that are the same C++ are one function. Anything that is not known
here is an error that names it: nothing is left out.

    ld.param.u64 %rd1, [f_param_0];    { char *const at = (params + 0); { ... R_rd1 = ... } }
    @%p1 bra $L__BB0_2;                if (R_p1) { goto L__BB0_2; }
"""
import re
import signal
import sys

from instructions import C_TYPE, Unknown, bits_of, statement

SPECIAL = {f"%{name}.{axis}": f"{variable}.{axis}" for name, variable in (
    ("tid", "threadIdx"), ("ctaid", "blockIdx"), ("ntid", "blockDim"), ("nctaid", "gridDim")) for axis in "xyz"}
SPECIAL["%laneid"] = "cuda_emu::current->lane"


class Kernel:
    """One .entry. `shared` says where the module's shared variables are."""

    def __init__(self, name, params, body, shared):
        self.name, self.body = name, body
        self.registers, self.lines, self.params = {}, [], {}
        self.shared, self.static = {}, 0  # bytes of static shared memory
        self.bytes = 0  # of the parameters
        for param in params:
            self.bytes = self.place_variable(param, self.params, self.bytes)
        for variable in shared:
            if re.search(rf"(?<![\w$]){re.escape(variable[0])}(?![\w$])", body):
                self.place_shared(variable)
        for text in statements(body):
            self.line(text)

    @staticmethod
    def place_variable(variable, places, at):
        name, size, align = variable
        places[name] = (at + align - 1) // align * align
        return places[name] + size

    def place_shared(self, variable):
        if variable[1] is None:  # extern: of the size that the launch gives
            self.shared[variable[0]] = "0ull"
        else:
            self.static = self.place_variable(variable, self.shared, self.static)
            self.shared[variable[0]] = f"SHARED_STATIC({self.shared[variable[0]]})"

    def place(self):
        """Where the kernel is, for messages at run time."""
        return f"{self.name[:80]}, statement {len(self.lines)}"

    # ---- operands: see instructions.py ----

    def get(self, word, kind):
        ctype = C_TYPE[kind]
        if kind == "pred":
            return f"(!{self.bits(word[1:])})" if word[0] == "!" else self.bits(word)
        if kind in ("f32", "f64"):
            return f"as_{ctype}({self.bits(word)})"
        return f"(({ctype}){self.bits(word)})"

    def bits(self, word):
        if re.fullmatch(r"0[fF][0-9a-fA-F]{8}", word):
            return f"0x{word[2:]}u"
        if re.fullmatch(r"0[dD][0-9a-fA-F]{16}", word):
            return f"0x{word[2:]}ull"
        if word in SPECIAL:
            return f"(uint32_t){SPECIAL[word]}"
        if word in self.registers:
            return self.register(word)
        if re.fullmatch(r"-?(0x[0-9a-fA-F]+|\d+)U?", word):
            return f"({word.rstrip('U')}ll)"
        if word in self.shared:
            return self.shared[word]
        raise Unknown

    def put(self, word, expression, kind):
        if word == "_":
            return f"(void)({expression});"
        width = self.registers[word]
        if kind in ("f32", "f64"):
            expression = f"{C_TYPE[kind]}_bits({expression})"
        elif width != "bool":  # signed results are extended with their sign
            expression = f"({C_TYPE[kind]})({expression})"
        return f"{self.register(word)} = ({width})({expression});"

    def address(self, word, space):
        base, _, plus = word.strip("[] ").partition("+")
        plus = int(plus or 0)
        if space == "param":
            return f"const_cast<char *>(params + {self.params[base] + plus})"
        if space == "shared":
            return f"(shared + (uint32_t)({self.get(base, 'u64')} + {plus}))"
        return f"(char *)(uintptr_t)({self.get(base, 'u64')} + ({plus}ll))"

    @staticmethod
    def register(word):
        return "R" + re.sub(r"\W", "_", word)

    @staticmethod
    def label(word):
        return re.sub(r"\W", "_", word)

    @staticmethod
    def inside(text):
        return [part.strip() for part in text.strip("{} ").split(",")]

    # ---- statements ----

    def line(self, text):
        if text.startswith(".reg"):
            self.declare(text)
        elif text.startswith(".shared"):
            self.place_shared(variable_of(text))
        elif text.startswith(".pragma"):
            return
        elif text.endswith(":"):
            self.lines.append(f"{self.label(text[:-1])}:;")
        else:
            self.instruction(text)

    def declare(self, text):
        kind, names = re.fullmatch(r"\.reg \.(\w+) (.*)", text).groups()
        width = "bool" if kind == "pred" else f"uint{bits_of(kind)}_t"
        for name in names.replace(" ", "").split(","):
            many = re.fullmatch(r"(%?\w+)<(\d+)>", name)
            for register in [f"{many[1]}{i}" for i in range(int(many[2]))] if many else [name]:
                if self.registers.setdefault(register, width) != width:
                    sys.exit(f"translate.py: kernel {self.name}: two registers {register}")

    def instruction(self, text):
        guard, opcode, rest = re.fullmatch(r"(@!?%?\w+ )?([\w.]+) ?(.*)", text).groups()
        try:
            done = statement(self, opcode, operands(rest))
            condition = f"if ({self.get(guard[1:].strip(), 'pred')}) " if guard else ""
        except (Unknown, KeyError):
            sys.exit(f"translate.py: kernel {self.name}: `{text}` is not known: add it to "
                     "dev/emulation/ptx/instructions.py")
        self.lines.append(f"    {condition}{{ {done} }}")

    def text(self, function):
        """The C++ function. Only registers that it uses are declared."""
        body = "\n".join(self.lines)
        used, width = {}, {self.register(name): ctype for name, ctype in self.registers.items()}
        for word in sorted(set(re.findall(r"\bR\w+", body))):
            used.setdefault(width[word], []).append(f"{word} = 0")
        declared = "".join(f"    {width} {', '.join(names)};\n" for width, names in sorted(used.items()))
        return (f"static void {function}(const char *params) {{\n"
                f"    char *const shared = (char *)cuda_emu::dynamic_shared();\n"
                f"    (void)params, (void)shared;\n{declared}{body}\n}}\n")


def variable_of(text):
    """(name, bytes, alignment) of a declaration such as `.param .align 8 .b8 name[72]`; bytes None: `name[]`."""
    align = re.search(r"\.align (\d+)", text)
    kind, name, count = re.search(r"\.([busf]\d+) ([\w$]+)(\[\d*\])?$", text).groups()
    size = bits_of(kind) // 8
    bytes_ = None if count == "[]" else size * int((count or "[1]")[1:-1])
    return name, bytes_, int(align[1]) if align else size


def operands(text):
    """Splits at commas outside of braces and brackets."""
    return [part.strip() for part in re.split(r",(?![^{]*\}|[^\[]*\])", text) if part.strip()]


def statements(body):
    """The statements and labels of a function, without the braces of inline assembly."""
    body = re.sub(r"//[^\n]*", "", body)
    for text in re.split(r";|(?<=:)\n", body):
        text = re.sub(r"\s+", " ", text).strip()
        text = text.lstrip("{} ")
        while found := re.match(r"(\$\w+:) ?", text):
            yield found[1]
            text = text[found.end():]
        if text:
            yield text


def kernels_of(path):
    """Yields (name, parameters and body as text, Kernel) of each .entry, and first the target."""
    with open(path, encoding="utf-8") as file:
        text = file.read()
    yield int(re.search(r"^\.target sm_(\d+)", text, re.MULTILINE)[1])
    entry = r"^(?:\.visible |\.weak )?\.entry (\w+)\((.*?)\)(.*?)\n\{(.*?)\n\}"
    outside = re.sub(r"//[^\n]*", "", re.sub(entry, "", text, flags=re.DOTALL | re.MULTILINE))
    shared = []
    for line in filter(None, (re.sub(r"\s+", " ", part).strip() for part in re.split(r";|\n\n", outside))):
        if re.match(r"(\.extern |\.weak )?\.shared ", line):
            shared.append(variable_of(line))
        elif not re.match(r"\.(version|target|address_size)", line):
            sys.exit(f"translate.py: {path}: `{line[:100]}` is not known")
    for name, params, _, body in re.findall(entry, text, re.DOTALL | re.MULTILINE):
        list_of = [variable_of(re.sub(r"\s+", " ", param).strip()) for param in params.split(",") if param.strip()]
        yield name, params + body, lambda n=name, p=list_of, b=body: Kernel(n, p, b, shared)


def main(paths):
    known, functions, table = {}, {}, []
    print('#include "dev/emulation/ptx/ptx_run.h"\n')
    for path in paths:
        target, *kernels = kernels_of(path)
        for name, text, make in kernels:
            text = re.sub(r"\$L__BB\d+", "$L__BB", text)
            if (name, text) not in known:
                kernel = known[name, text] = make()
                same = name, re.sub(r"L__BB\d+", "L__BB", kernel.text(""))
                if same not in functions:
                    functions[same] = f"kernel_{len(functions) + 1}_{target}"
                    print(kernel.text(functions[same]))
                kernel.function = functions[same]
            kernel = known[name, text]
            table.append(f'    {{"{name}", {target}, {kernel.function}, {kernel.bytes}, {kernel.static}}},')
    print("const struct ptx_kernel ptx_kernels[] = {", *table, "    {NULL, 0, NULL, 0, 0}};", sep="\n")


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `| head` ends this program without a traceback
    main(sys.argv[1:])
