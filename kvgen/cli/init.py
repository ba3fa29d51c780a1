"""`kvgen init`: a spec from a model's config.json."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kvgen.architectures import DEFAULT_ARCHS
from kvgen.cli.console import at_least, complete_kv_dtype, complete_preset, say


def init(
    config: Annotated[
        Path,
        typer.Option(
            "--from",
            metavar="CONFIG.JSON",
            help="A Hugging Face model config, or the folder that has it; read as JSON, nothing else.",
        ),
    ],
    output: Annotated[
        Path | None,
        typer.Option("-o", "--output", metavar="FILE", help="Where to write; by default stdout.", show_default=False),
    ] = None,
    kv_dtype: Annotated[
        str,
        typer.Option(
            metavar="DTYPE",
            autocompletion=complete_kv_dtype,
            help="How KV is stored, see above; auto, if not given, is as the checkpoint says, else in its type. For some kinds "
            "of layers alone: local=bf16,full=fp8.",
            show_default=False,
        ),
    ] = "auto",
    tp: Annotated[
        int,
        typer.Option(
            "--tp",
            metavar="N",
            callback=at_least(1),
            help="The share of one of N GPUs under tensor parallelism: 1/N of the heads.",
            show_default=False,
        ),
    ] = 1,
    page_size: Annotated[
        int | None,
        typer.Option(
            "--page-size",
            metavar="N",
            callback=at_least(1),
            help="Tokens a page; 16 if not given, 64 of latent rows, or the preset's own.",
            show_default=False,
        ),
    ] = None,
    preset: Annotated[
        str | None,
        typer.Option(
            "--preset",
            metavar="NAME",
            autocompletion=complete_preset,
            help="An engine's layout instead of kvgen's: vllm, sglang, flashinfer_nhd; `kvgen list --presets` has all.",
            show_default=False,
        ),
    ] = None,
    arch: Annotated[
        str | None,
        typer.Option(
            "--arch",
            metavar="A,B",
            help="Architectures, with commas between; sm_80,sm_90a if not given.",
            show_default=False,
        ),
    ] = None,
    architecture: Annotated[
        str | None,
        typer.Option(
            "--as",
            metavar="CLASS",
            help="Read the config as this class's, such as LlamaForCausalLM, where its own has no reader.",
            show_default=False,
        ),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite the file.")] = False,
) -> None:
    """Write a spec for a model's KV cache and its attention, from its config: heads, rope, windows, soft caps, sinks.

    Layers whose heads differ get a set each, in a list. docs/models.md has the models that are read.

    A checkpoint whose KV is quantized, as config.json or hf_quant_config.json beside it says (compressed-tensors, ModelOpt,
    Quark), gets a cache that is, unless --kv-dtype says otherwise:

    \b
    bf16 f16 f32   elements as they are
    fp8            e4m3 by a cast, no scales
    fp8-static     e4m3, a scale of the caller's a layer for K and for V; int8-static: signed bytes
    fp8-scaled     e4m3, a scale per token and head that append computes; int8: signed bytes
    int4           16 levels, a scale and a zero point per 32 dims
    nvfp4          e2m1, an e4m3 scale per 16 dims, a given f32 scale on top
    fp8_ds_mla     latent rows of 656 bytes: e4m3, four f32 scales, the RoPE part in bf16

    \b
    kvgen init --from config.json                         look first
    kvgen init --from config.json -o specs/llama3_8b.py   the file's name becomes the set's
    kvgen init --from config.json --kv-dtype int8
    kvgen init --from config.json --kv-dtype full=fp8,local=bf16
    kvgen init --from config.json --tp 8 --preset vllm --arch sm_90a,sm_100f
    """
    from kvgen import models
    from kvgen.errors import ConfigError
    from kvgen.files import kind_of, named, write_inside
    from kvgen.schema.kernel_set import NAME, check_name

    text = models.spec_text(
        models.read(config),
        name=output.stem if output is not None and NAME.fullmatch(output.stem) else None,
        source=named(config),
        arch=_archs(arch) if arch is not None else DEFAULT_ARCHS,
        kv_dtype=kv_dtype,
        serving=models.Serving(tp, page_size, preset),
        architecture=architecture,
        quantization=models.read_quantization(config),
    )
    if output is None:
        typer.echo(text, nl=False)
        return
    shown = named(output)
    if output.suffix != ".py":
        raise ConfigError(f"-o: got {shown!r}; specs are Python files; use a name ending in .py")
    try:
        check_name("-o", output.stem)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    kind = kind_of(output)
    if kind not in ("missing", "file"):
        raise ConfigError(f"-o: {shown} is a {kind}; give the name of a new file, or of a file to overwrite")
    if kind == "file" and not force:
        raise ConfigError(f"-o: {shown} exists already; give another name, or --force to overwrite it")
    _check_names(output, text)
    write_inside(output.parent, output.name, text.encode())
    say(f"wrote {shown}; next: {_next(output)}")


def _next(output: Path) -> str:
    """The next command for a spec that was just written: a build finds specs in the project's folder of specs alone."""
    from kvgen.cli.settings import settings
    from kvgen.config import find_config
    from kvgen.errors import ConfigError
    from kvgen.files import named

    try:
        config = find_config(settings().project)
    except ConfigError:
        return "`kvgen new DIR` makes a project; move the spec into its specs/, and run `kvgen build` there"
    if output.parent.resolve() == config.specs:
        return f"kvgen build {output.stem}"
    return f"move it into {named(config.specs)}, where `kvgen build` looks for specs, then kvgen build {output.stem}"


def _check_names(output: Path, text: str) -> None:
    """Raise ConfigError where a spec beside `output` has a set of a name that the new one has: a project takes one of each."""
    from kvgen.errors import ConfigError
    from kvgen.files import is_folder, named
    from kvgen.schema.loader import spec_files
    from kvgen.schema.set_names import set_names

    names = set_names(text, output.stem) or (output.stem,)
    for file in spec_files(output.parent, output.parent) if is_folder(output.parent) else ():
        name = next((name for name in names if name in file.expected), None)
        if name is not None and file.path.name != output.name:
            raise ConfigError(
                f"-o: {named(output)} would have a set {name!r}, which {named(file.path)} has too; each set needs a name of its "
                "own, which begins with the file's, cut to 40 characters; give another file name"
            )


def _archs(text: str) -> tuple[str, ...]:
    """The architectures of `--arch`; raises ConfigError for one that there is none of."""
    from kvgen.architectures import ARCHS
    from kvgen.errors import ConfigError
    from kvgen.schema.hints import nearest

    names = tuple(name.strip() for name in text.split(","))
    for name in names:
        if name not in ARCHS:
            meant = nearest(name, list(ARCHS), "KernelSet", "arch")
            raise ConfigError(f"--arch: got {name!r}; it must be one of {', '.join(ARCHS)}{meant}")
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise ConfigError(f"--arch: got {twice!r} twice; give each once")
    return names
