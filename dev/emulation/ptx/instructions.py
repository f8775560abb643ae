"""What each PTX instruction does, as a C++ statement. Each function names its section of the manual, "Parallel
Thread Execution ISA", by title, because the numbers of sections change between versions (9.0 was read).

A register holds bits: an unsigned integer of its declared width, or a bool for a predicate. An instruction's
type says how it reads these bits. k.get(operand, type) is the C++ expression of an operand read in this way,
and k.put(register, expression, type) the assignment of a result."""
import re

C_TYPE = {"u8": "uint8_t", "s8": "int8_t", "b8": "uint8_t", "u16": "uint16_t", "s16": "int16_t",
          "b16": "uint16_t", "u32": "uint32_t", "s32": "int32_t", "b32": "uint32_t", "u64": "uint64_t",
          "s64": "int64_t", "b64": "uint64_t", "f32": "float", "f64": "double", "bf16": "uint16_t",
          "bf16x2": "uint32_t", "pred": "bool"}
INSTRUCTIONS = {}  # name: (modifiers that it may have, function)


class Unknown(Exception):
    """An instruction, or a form of it, that is not in this file."""


def instruction(names, modifiers=""):
    def register(function):
        for name in names.split():
            INSTRUCTIONS[name] = set(modifiers.split()), function
        return function
    return register


def bits_of(kind):
    return int(re.search(r"\d+", kind).group())


def unsigned(kind):
    """The type of the same width in which C++ arithmetic wraps around, as PTX's does."""
    return f"u{bits_of(kind)}" if kind[0] in "usb" and kind != "bf16" else kind


def statement(k, opcode, operands):
    """The C++ statement of one instruction."""
    name, *rest = opcode.split(".")
    if name not in INSTRUCTIONS:
        raise Unknown
    modifiers, function = INSTRUCTIONS[name]
    types = [word for word in rest if word in C_TYPE]
    how = [word for word in rest if word not in C_TYPE]
    if not set(how) <= modifiers:
        raise Unknown
    return function(k, name, how, types, operands)


# ---- Integer Arithmetic Instructions; Floating Point Instructions ---------------------------------

@instruction("add sub", "rn")
def add(k, name, _how, types, o):
    """add, sub: floating point results are rounded to nearest even, which is C++'s default."""
    kind, sign = unsigned(types[0]), {"add": "+", "sub": "-"}[name]
    return k.put(o[0], f"{k.get(o[1], kind)} {sign} {k.get(o[2], kind)}", kind)


@instruction("mul mad", "rn lo hi wide")
def multiply(k, name, how, types, o):
    """mul, mad: of the product's bits, .lo keeps the lower half, .hi the upper half, .wide all."""
    kind = types[0]
    if kind in ("f32", "f64"):
        if name == "mad":
            raise Unknown
        return k.put(o[0], f"{k.get(o[1], kind)} * {k.get(o[2], kind)}", kind)
    width = bits_of(kind)
    wide = {16: f"{kind[0]}32", 32: f"{kind[0]}64"}.get(width)
    if "wide" in how:
        # The factors are extended with their sign, and their product fits.
        result, product = wide, f"({C_TYPE[wide]}){k.get(o[1], kind)} * {k.get(o[2], kind)}"
    elif "hi" in how:
        if width != 32:
            raise Unknown
        result, product = kind, f"(({C_TYPE[wide]}){k.get(o[1], kind)} * {k.get(o[2], kind)}) >> 32"
    else:
        result = "u64" if width == 64 else "u32"
        kind = unsigned(kind)
        product = f"({C_TYPE[result]}){k.get(o[1], kind)} * {k.get(o[2], kind)}"
    if name == "mad":
        last = unsigned(result)
        return k.put(o[0], f"({C_TYPE[last]})({product}) + {k.get(o[3], last)}", last)
    return k.put(o[0], product, result)


@instruction("fma", "rn rm")
def fma(k, _name, how, types, o):
    """fma: a b + c, rounded once, to nearest even (.rn) or towards minus infinity (.rm)."""
    kind = types[0]
    call = {("f32", "rn"): "fmaf", ("f64", "rn"): "fma", ("f32", "rm"): "fma_down"}.get((kind, how[0]))
    if not call:
        raise Unknown
    return k.put(o[0], f"{call}({', '.join(k.get(x, kind) for x in o[1:])})", kind)


@instruction("div rem", "rn approx")
def divide(k, name, how, types, o):
    """div, rem: .rn is IEEE 754's quotient; .approx may be off by 2 ulp."""
    kind = types[0]
    a, b = k.get(o[1], kind), k.get(o[2], kind)
    if "approx" in how:
        return k.put(o[0], f"divide_approx({a}, {b})", kind)
    return k.put(o[0], f"{a} {'/' if name == 'div' else '%'} {b}", kind)


@instruction("min max")
def extreme(k, name, _how, types, o):
    """min, max: of a number and NaN the result is the number, as of C's fminf and fmaxf."""
    kind = types[0]
    call = {"f32": f"f{name}f", "f64": f"f{name}"}.get(kind, f"std::{name}")
    return k.put(o[0], f"{call}({k.get(o[1], kind)}, {k.get(o[2], kind)})", kind)


@instruction("neg abs")
def sign_of(k, name, _how, types, o):
    """neg, abs."""
    kind = types[0]
    if name == "neg":
        kind = unsigned(kind)
        return k.put(o[0], f"-{k.get(o[1], kind)}", kind)
    return k.put(o[0], f"std::abs({k.get(o[1], kind)})", kind)


@instruction("rcp sqrt rsqrt ex2 lg2", "rn approx ftz")
def function_of(k, name, how, types, o):
    """rcp.rn, sqrt.rn: as IEEE 754. rsqrt.approx, ex2.approx, lg2.approx: with a small relative error, here
    none. .ftz: numbers below 2^-126 count as 0, and so do results."""
    kind, x = types[0], k.get(o[1], types[0])
    rounded = name in ("rcp", "sqrt") and "rn" in how
    if rounded and kind == "f64":
        return k.put(o[0], f"sqrt({x})" if name == "sqrt" else f"1 / {x}", kind)
    if (name in ("rcp", "sqrt")) != ("rn" in how) or kind != "f32":
        raise Unknown
    if "ftz" in how:
        x = f"flush({x})"
    call = {"rcp": f"1 / {x}", "sqrt": f"sqrtf({x})", "rsqrt": f"(float)(1 / sqrt((double){x}))",
            "ex2": f"exp2f({x})", "lg2": f"log2f({x})"}[name]
    return k.put(o[0], f"flush({call})" if "ftz" in how else call, kind)


@instruction("bfe")
def bit_field_extract(k, _name, _how, types, o):
    """bfe: bits b ... b + c - 1 of a."""
    if types[0] != "u32":
        raise Unknown
    return k.put(o[0], f"extract({', '.join(k.get(x, 'u32') for x in o[1:])})", "u32")


@instruction("bfi")
def bit_field_insert(k, _name, _how, types, o):
    """bfi: b, with its bits c ... c + d - 1 replaced by the lowest bits of a."""
    if types[0] != "b32":
        raise Unknown
    return k.put(o[0], f"insert({', '.join(k.get(x, 'u32') for x in o[1:])})", "u32")


@instruction("popc clz")
def count_bits(k, name, _how, types, o):
    """popc: the ones in a. clz: the zeros before the first one."""
    if types[0] != "b32":
        raise Unknown
    x = k.get(o[1], "u32")
    return k.put(o[0], f"__builtin_popcount({x})" if name == "popc" else f"count_zeros({x})", "u32")


# ---- Comparison and Selection Instructions --------------------------------------------------------

COMPARE = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}


@instruction("setp", " ".join([*COMPARE, *(name + "u" for name in COMPARE), "nan num and or xor"]))
def compare(k, _name, how, types, o):
    """setp: p|q = a compared with b. Of NaN, a comparison is false; with a `u` at its end, true. (`ne` is false,
    too, where C++'s != is true.) A third operand is a predicate with which the result is combined."""
    kind, what = types[0], how[0]
    a, b = k.get(o[1], kind), k.get(o[2], kind)
    number = f"(!std::isnan({a}) && !std::isnan({b}))"
    if what in ("nan", "num"):
        result = number if what == "num" else f"!{number}"
    elif kind[0] == "f" and what[-1] == "u":
        result = f"(!{number} || {a} {COMPARE[what[:-1]]} {b})"
    elif kind[0] == "f" and what == "ne":
        result = f"({number} && {a} != {b})"
    else:
        result = f"({a} {COMPARE[what]} {b})"
    if len(how) > 1:
        sign = {"and": "&&", "or": "||", "xor": "!="}[how[1]]
        third = k.get(o[3], "pred")
        pair = [f"{result} {sign} {third}", f"!{result} {sign} {third}"]
    else:
        pair = [result, f"!{result}"]
    return " ".join(k.put(p, x, "pred") for p, x in zip(o[0].split("|"), pair))


@instruction("selp")
def select(k, _name, _how, types, o):
    """selp: c ? a : b."""
    kind = unsigned(types[0])
    return k.put(o[0], f"{k.get(o[3], 'pred')} ? {k.get(o[1], kind)} : {k.get(o[2], kind)}", kind)


# ---- Logic and Shift Instructions -----------------------------------------------------------------

@instruction("and or xor not")
def logic(k, name, _how, types, o):
    """and, or, xor, not."""
    kind = types[0]
    if name == "not":
        return k.put(o[0], f"{'!' if kind == 'pred' else '~'}{k.get(o[1], kind)}", kind)
    sign = {"and": "&", "or": "|", "xor": "^"}[name]
    return k.put(o[0], f"{k.get(o[1], kind)} {sign} {k.get(o[2], kind)}", kind)


@instruction("shl shr")
def shift(k, name, _how, types, o):
    """shl, shr: by as many bits as a has, or more, everything is shifted out. shr.s fills with the sign."""
    kind, by = types[0], k.get(o[2], "u32")
    width, x = bits_of(kind), k.get(o[1], kind)
    if name == "shr" and kind[0] == "s":
        return k.put(o[0], f"{x} >> std::min({by}, {width - 1}u)", kind)
    return k.put(o[0], f"{by} < {width}u ? {x} {'<<' if name == 'shl' else '>>'} {by} : 0", unsigned(kind))


@instruction("shf", "l r wrap clamp")
def funnel_shift(k, _name, how, _types, o):
    """shf: shifts the 64 bits b:a; .l gives the upper half, .r the lower. .wrap: by c modulo 32; .clamp: by at
    most 32."""
    both = f"((uint64_t){k.get(o[2], 'u32')} << 32 | {k.get(o[1], 'u32')})"
    by = k.get(o[3], "u32")
    by = f"({by} & 31)" if "wrap" in how else f"std::min({by}, 32u)"
    return k.put(o[0], f"({both} << {by}) >> 32" if "l" in how else f"{both} >> {by}", "u32")


@instruction("lop3")
def logic_of_three(k, _name, _how, _types, o):
    """lop3: a logic function of three operands, given by its table of 8 bits."""
    return k.put(o[0], f"lop3({', '.join(k.get(x, 'u32') for x in o[1:4])}, {o[4]})", "u32")


# ---- Data Movement and Conversion Instructions ----------------------------------------------------

@instruction("mov")
def move(k, _name, _how, types, o):
    """mov: also packs several registers into one, the first into the lowest bits, and unpacks them."""
    kind = types[0].replace("f", "u") if types[0][0] == "f" else types[0]  # bits
    if "{" not in o[0] + o[1]:
        return k.put(o[0], k.get(o[1], kind), kind)
    parts = k.inside(o[0] if "{" in o[0] else o[1])
    width = bits_of(kind) // len(parts)
    if "{" in o[1]:
        joined = " | ".join(f"(uint64_t){k.get(x, f'u{width}')} << {i * width}" for i, x in enumerate(parts))
        return k.put(o[0], joined, kind)
    return f"const uint64_t whole = {k.get(o[1], kind)}; " + " ".join(
        k.put(x, f"whole >> {i * width}", f"u{width}") for i, x in enumerate(parts) if x != "_")


@instruction("ld st", "param global shared v2 v4 nc cs relaxed volatile")
def memory(k, name, how, types, o):
    """ld, st: addresses must be multiples of the whole access's size, that of all parts of a vector. Without a
    state space, the address is generic. .nc and .cs are hints for caches."""
    kind = types[0]
    space = next((word for word in how if word in ("param", "global", "shared")), "generic")
    count = 4 if "v4" in how else 2 if "v2" in how else 1
    place, registers = o if name == "st" else o[::-1]
    parts = k.inside(registers) if count > 1 else [registers]
    plain, size = f"u{bits_of(kind)}" if kind[0] == "f" else kind, bits_of(kind) // 8
    check = "" if space == "param" else f' aligned(at, {count * size}, "{name}.{space}");'
    lines = [f"char *const at = {k.address(place, space)};{check}"]
    for i, part in enumerate(parts):
        if name == "ld":
            lines.append(f"{{ {C_TYPE[plain]} x; memcpy(&x, at + {i * size}, {size}); {k.put(part, 'x', plain)} }}")
        else:
            lines.append(f"{{ const {C_TYPE[plain]} x = {k.get(part, plain)}; memcpy(at + {i * size}, &x, {size}); }}")
    return " ".join(lines)


@instruction("cvta", "to global shared")
def convert_address(k, _name, how, _types, o):
    """cvta: a generic address of a state space's, or, with .to, the reverse. Global addresses are generic ones;
    those in shared memory count from its begin."""
    x = k.get(o[1], "u64")
    if "shared" in how:
        x = f"{x} {'-' if 'to' in how else '+'} (uint64_t)(uintptr_t)shared"
    return k.put(o[0], x, "u64")


@instruction("cvt", "rn rni rzi rmi rpi sat ftz")
def convert(k, _name, how, types, o):
    """cvt: from the second type to the first. .rn rounds to nearest even, .rzi, .rni, .rmi and .rpi to whole
    numbers (towards zero, nearest even, down, up). .sat: into 0 ... 1, and NaN to 0."""
    to, source = types
    x = k.get(o[1], source)
    if to == "bf16x2":  # the first operand becomes the upper half
        if source != "f32" or how != ["rn"]:
            raise Unknown
        return k.put(o[0], f"(uint32_t)round_bf16({x}) << 16 | round_bf16({k.get(o[2], 'f32')})", "b32")
    if to == "bf16":
        if source != "f32" or how != ["rn"]:
            raise Unknown
        return k.put(o[0], f"round_bf16({x})", "u16")
    if source == "bf16":
        if to != "f32" or how:
            raise Unknown
        return move(k, "mov", [], ["b32"], [o[0], f"{{0,{o[1]}}}"])  # as nvcc writes it for compute_80
    whole = {"rzi": "trunc", "rni": "nearbyint", "rmi": "floor", "rpi": "ceil"}
    if to == source == "f32" and how == ["sat"]:
        return k.put(o[0], f"saturate({x})", "f32")
    if source[0] == "f" and how and how[0] in whole:
        return k.put(o[0], f"({C_TYPE[to]}){whole[how[0]]}((double){x})", to)
    if (source[0] == "f" or to[0] == "f") and to != "f64" and how != ["rn"] or source[0] == "f" and to[0] != "f":
        raise Unknown
    return k.put(o[0], f"({C_TYPE[to]}){x}", to)


@instruction("prmt")
def permute(k, _name, _how, _types, o):
    """prmt: each 4 bits of c choose one of the 8 bytes b:a, or, with their highest bit, copies of its sign."""
    return k.put(o[0], f"permute({', '.join(k.get(x, 'u32') for x in o[1:])})", "u32")


@instruction("shfl", "sync bfly idx down up")
def shuffle(k, _name, how, _types, o):
    """shfl.sync: d|p = a of another lane, and whether that lane is in range."""
    mode = next(word for word in how if word != "sync")
    result, _, in_range = o[0].partition("|")
    arguments = ", ".join([f"SHUFFLE_{mode.upper()}", *(k.get(x, "u32") for x in o[1:])])
    return (f"bool in_range; const uint32_t x = shuffle({arguments}, &in_range); {k.put(result, 'x', 'u32')}"
            + (f" {k.put(in_range, 'in_range', 'pred')}" if in_range else ""))


@instruction("cp", "async cg shared global commit_group wait_group")
def copy_async(k, _name, how, _types, o):
    """cp.async, cp.async.commit_group, cp.async.wait_group: 16 bytes from global to shared memory; of these,
    those beyond the source's size become zeros."""
    if how == ["async", "commit_group"]:
        return "cp_async_commit();"
    if how == ["async", "wait_group"]:
        return f"cp_async_wait<{o[0]}>();"
    if o[2] != "16":
        raise Unknown
    size = k.get(o[3], "u32") if len(o) > 3 else "16u"
    return f"copy_16({k.address(o[0], 'shared')}, {k.address(o[1], 'global')}, {size});"


# ---- Control Flow Instructions --------------------------------------------------------------------

@instruction("bra", "uni")
def branch(k, _name, _how, _types, o):
    """bra."""
    return f"goto {k.label(o[0])};"


@instruction("ret exit")
def leave(_k, _name, _how, _types, _o):
    """ret, exit."""
    return "return;"


# ---- Parallel Synchronization and Communication Instructions --------------------------------------

@instruction("bar", "sync warp")
def barrier(k, _name, how, _types, o):
    """bar.sync 0: of all threads of the block. bar.warp.sync: of the lanes of a mask."""
    if how == ["warp", "sync"]:
        return f"__syncwarp({k.get(o[0], 'u32')});"
    if how != ["sync"] or o != ["0"]:
        raise Unknown
    return f'cuda_emu::sync_block("{k.place()}");'


@instruction("membar fence", "gl sc acq_rel gpu sys cta")
def fence(_k, _name, _how, _types, _o):
    """membar, fence."""
    return "cuda_emu::fence();"


# ---- Warp Level Matrix Multiply-Accumulate Instructions -------------------------------------------

@instruction("ldmatrix", "sync aligned m8n8 x4 trans shared")
def load_matrix(k, _name, how, _types, o):
    """ldmatrix: four 8x8 matrices of 16-bit elements; lane l gives the address of row l % 8 of matrix l / 8."""
    if "x4" not in how or "shared" not in how:
        raise Unknown
    call = "ldmatrix_x4_trans" if "trans" in how else "ldmatrix_x4"
    out = " ".join(k.put(x, f"out[{i}]", "u32") for i, x in enumerate(k.inside(o[0])))
    return f"uint32_t out[4]; {call}(out, {k.address(o[1], 'shared')}); {out}"


@instruction("mma", "sync aligned m16n8k16 row col")
def multiply_matrices(k, _name, how, types, o):
    """mma.m16n8k16: d = a b + c of a warp, with bfloat16 a and b, and float32 c and d."""
    if types != ["f32", "bf16", "bf16", "f32"] or how[2:] != ["m16n8k16", "row", "col"]:
        raise Unknown
    given = ", ".join(k.get(x, "u32") for operand in o[1:] for x in k.inside(operand))
    out = " ".join(k.put(x, f"out[{i}]", "u32") for i, x in enumerate(k.inside(o[0])))
    return f"const uint32_t in[10] = {{{given}}}; uint32_t out[4]; mma(out, in); {out}"
