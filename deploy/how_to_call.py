"""What to type next: lines that work as they stand, also with TLS and bearer tokens."""

import shutil
import sys
from pathlib import Path
from shlex import quote
from typing import Final

from scheduler_svc.config import SchedulerConfig
from stepwire_client import AsyncClient, ModelInfo, Retry, StepwireError, Tls

# A client certificate is the caller's own; only its place can be named.
CLIENT_CERT: Final = "CLIENT.pem"
CLIENT_KEY: Final = "CLIENT.key"
PROBE_S: Final = 2.0


async def address_to_call(bound: str, config: SchedulerConfig) -> str:
    """Where clients on this machine reach the API. With TLS: a name that stands in the certificate, if one does."""
    if config.tls_cert is None or config.tls_client_ca is not None or bound.startswith("unix:"):
        return bound
    named = f"localhost:{bound.rpartition(':')[2]}"
    for address in (bound, named):
        async with AsyncClient(address, tls=Tls(config.tls_cert), retry=Retry(attempts=1)) as client:
            try:
                await client.health(deadline=PROBE_S)
            except StepwireError:
                continue
            return address
    return bound


def own_folder() -> Path | None:
    """Where this installation's commands lie; None: the shell finds them by their names."""
    folder = Path(sys.executable).parent
    script = folder / "stepwire"
    return folder if script.is_file() and shutil.which("stepwire") != str(script) else None


def how_to_call(
    address: str, config: SchedulerConfig, folder: Path | None = None, info: ModelInfo | None = None
) -> str:
    """What to type next. A token is not shown but read from its file. `folder`: of commands no shell finds by name.
    `info`: None: nobody has asked what the model can take."""
    where = f"-unix {quote(address.removeprefix('unix:'))}" if address.startswith("unix:") else address
    stepwire = quote(str(folder / "stepwire")) if folder else "stepwire"
    lines = [f"Serving on {address}. Call it:", ""]
    imports, arguments = ["from stepwire_client import Client"], [f'"{address}"']
    grpcurl, flags, header = "-plaintext ", "", ""
    if config.auth_tokens_file is not None:
        file = quote(str(config.auth_tokens_file.absolute()))
        lines.append(f"  export STEPWIRE_TOKEN=$(awk 'NF && $1 !~ /^#/ {{print $1; exit}}' {file})")
        header = ' -H "authorization: Bearer $STEPWIRE_TOKEN"'
        imports.insert(0, "import os")
        arguments.append('token=os.environ["STEPWIRE_TOKEN"]')
    if config.tls_cert is not None:
        # The served chain is what a client can trust whoever signed it.
        trusted = str(config.tls_cert.absolute())
        grpcurl, flags = f"-cacert {quote(trusted)} ", f" --tls-ca {quote(trusted)}"
        tls = [f"ca=Path({trusted!r})"]
        if config.tls_client_ca is not None:
            grpcurl += f"-cert {CLIENT_CERT} -key {CLIENT_KEY} "
            flags += f" --tls-cert {CLIENT_CERT} --tls-key {CLIENT_KEY}"
            tls += [f'cert=Path("{CLIENT_CERT}")', f'key=Path("{CLIENT_KEY}")']
        imports = [*imports[:-1], "from pathlib import Path", "from stepwire_client import Client, Tls"]
        arguments.append(f"tls=Tls({', '.join(tls)})")
    if info is None or info.has_chat_template:
        command, call = "chat", 'chat([{"role": "user", "content": "Hello"}]).text'
    elif info.has_tokenizer:
        command, call = "generate Hello", 'complete("Hello").text'
    else:
        command, call = "", "complete(token_ids=[1, 2, 3]).token_ids"
    body = '"text": "Hello"' if command else '"token_ids": {"ids": [1, 2, 3]}'
    lines += [
        *([f"  {stepwire} {command} --address {quote(address)}{flags}"] if command else []),
        f'  grpcurl {grpcurl}-d \'{{{body}, "stop": {{"max_tokens": 16}}}}\'{header} {where} '
        "stepwire.v1.Inference/Generate",
        "",
        *([f"  # Python: {folder / 'python'}, or any with client/ installed"] if folder else []),
        *(f"  {line}" for line in imports),
        f"  print(Client({', '.join(arguments)}).{call})",
        "",
        f"Watch its steps: {stepwire} top --address {quote(address)}{flags}",
        "Ctrl-C stops it.",
    ]
    return "\n".join(lines)
