"""Secrets of the environment stay out of texts, logs, and everything a run writes."""

from __future__ import annotations

import io
import json
import os
import sys
import urllib.parse
from collections.abc import Iterator
from pathlib import Path

import pytest

from launcher.__main__ import main
from launcher.processes import torchrun
from launcher.processes.failure import failure_file, write_failure
from launcher.secrets import MaskedStream, mask, refuse_secret, secrets_of
from strategies.errors import PlanError
from tests.launcher.command_line import run_here

CANARY = "canary-5f1d20-do-not-copy"


def test_variables_are_known_by_their_names():
    environment = {
        "WANDB_API_KEY": "0123456789", "HF_TOKEN": "abcdefgh", "DB_PASSWORD": "hunter2hunter2",
        "KEYBOARD": "us-international", "MONKEY": "banana-banana", "SHORT_KEY": "abc",
        "SSH_KEY": "/root/.ssh/id_rsa", "HOME": "/root", "PATH_TOKENS": "abcdefghi",
        "PWD": "/home/somebody", "COMPASS": "north-north-west", "AUTHOR": "somebody else",
    }  # fmt: skip
    assert set(secrets_of(environment).values()) == {"WANDB_API_KEY", "HF_TOKEN", "DB_PASSWORD"}
    more = {
        "PGPASSWORD": "hunter2hunter3", "MYSQL_PWD": "hunter2hunter4", "GITHUB_PAT": "hunter2-5",
        "SSH_PASSPHRASE": "hunter2 hunter6", "NPM_AUTH": "hunter2hunter7", "MYTOKEN": "hunter2-8",
        "SLACK_WEBHOOK_URL": "https://hooks.example.com/services/T0/B0/x9",
        "ENCRYPTION_KEYS": "hunter2-12", "LDAP_BINDPW": "hunter2-13", "GPG_PIN": "hunter2-14",
        "VAULT_UNSEAL": "hunter2-15", "AWS_SESSION": "hunter2-16", "WANDB_API": "hunter2-17",
        "DATABASE_URL": "postgres://me:hunter2-10@db/name", "https_proxy": "http://me:hunter2-11@p",
    }  # fmt: skip
    text = " ".join(f"{name}: {value}" for name, value in more.items())
    assert set(secrets_of(more).values()) == set(more)
    assert "hunter2" not in mask(text, more)
    assert "hooks" not in mask(text, more)
    assert mask("see https://me:its-secret@host/x", {}) == "see https://***@host/x"


def test_a_text_is_masked_longest_secret_first():
    environment = {"A_KEY": "12345678", "B_KEY": "1234567890"}
    assert mask("a 1234567890 b 12345678 c", environment) == "a *** b *** c"


def test_a_stream_passes_everything_but_secrets_on(monkeypatch):
    monkeypatch.setenv("MY_TOKEN", CANARY)
    below = io.StringIO()
    stream = MaskedStream(below)
    print(f"it is {CANARY}", file=stream)
    stream.writelines(["plain\n"])
    stream.flush()
    assert below.getvalue() == "it is ***\nplain\n"


def test_a_failing_rank_does_not_tell_its_parent(tmp_path, monkeypatch):
    monkeypatch.setenv("MY_TOKEN", CANARY)
    (tmp_path / "logs").mkdir()
    write_failure(tmp_path, 0, ValueError(f"401 for {CANARY}"))
    assert json.loads(failure_file(tmp_path, 0).read_text())["message"] == "401 for ***"


def _files(folder: Path) -> Iterator[Path]:
    return (path for path in folder.rglob("*") if path.is_file())


PLACES = {
    "a word": ["tracking.entity=" + CANARY],
    "a part of a word": [f"experiment_name='run {CANARY} x'"],
    "a list": [f"tracking.tags=[a,{CANARY}]"],
    "a key that says so": [f"+tracking.api_key={CANARY}"],
    "a variable": ["tracking.entity=${oc.env:CANARY_TOKEN}"],
    "a variable by another name": ["tracking.entity=${oc.env:HARMLESS}"],
    "a default": ["tracking.entity=${oc.env:NOT_THERE," + CANARY + "}"],
    "a folder": [f"hydra.run.dir=outputs/{CANARY}"],
    "a folder with a quoted variable": ["hydra.run.dir=\"x/${oc.env:'CANARY_TOKEN'}\""],
    "a folder with a variable in a variable": ["hydra.run.dir='x/${oc.env:${oc.env:NAME}}'"],
    "a folder with a harmless variable": ["hydra.run.dir='x/${oc.env:HARMLESS}'"],
    "a password in a variable's URL": ["tracking.entity=${oc.env:DATABASE_URL}"],
    "a sweep": ["-m", f"experiment_name=a,{CANARY}"],
    "a file": ["model=mine"],
    "a file with a variable": ["model=yours"],
}


@pytest.mark.parametrize("words", PLACES.values(), ids=PLACES)
def test_a_secret_is_refused_wherever_it_stands_and_nothing_is_written(
    words, tmp_path, monkeypatch
):
    monkeypatch.setenv("CANARY_TOKEN", CANARY)
    monkeypatch.setenv("HARMLESS", CANARY)
    monkeypatch.setenv("NAME", "HARMLESS")
    monkeypatch.setenv("DATABASE_URL", f"postgres://me:{CANARY}@db/name")
    options = tmp_path / "options" / "model"
    options.mkdir(parents=True)
    (options / "mine.yaml").write_text(f"name: {CANARY}\n")
    (options / "yours.yaml").write_text("name: ${oc.env:HARMLESS}\n")
    given = ["--config-dir", str(tmp_path / "options"), "mode=simulate", *words]
    done = run_here(given, tmp_path / "cwd", monkeypatch)
    done.assert_refused()
    assert "credential" in done.errors
    assert CANARY not in done.errors
    assert [path for path in _files(tmp_path) if CANARY in path.read_text()] == [
        options / "mine.yaml"
    ]


def test_what_a_model_prints_under_torchrun_is_masked_as_elsewhere(monkeypatch, capsys):
    monkeypatch.setenv("CANARY_TOKEN", CANARY)
    for name in ("stdout", "stderr"):
        monkeypatch.setattr(sys, name, getattr(sys, name))

    def follow() -> int:
        for stream in (sys.stdout, sys.stderr):
            stream.write(os.environ["CANARY_TOKEN"] + "\n")
        return 0

    for name, fake in {
        "joins": lambda words: True, "rank": lambda: 1, "follow": follow, "leave": lambda _: None,
    }.items():  # fmt: skip
        monkeypatch.setattr(torchrun, name, fake)
    main(["cluster=torchrun"])
    assert capsys.readouterr() == ("***\n", "***\n")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("model.experts_per_token", "2"),
        ("model.args.num_experts_per_token", "2"),
        ("model.args.bos_token", "<s>"),
        ("user.pad_token", "${user.eos_token}"),
        ("user.price.token", "0.5"),
    ],
)
def test_a_token_of_a_text_is_no_credential(name, value):
    refuse_secret(name, value)


@pytest.mark.parametrize("name", ["hf_token", "user.token", "user.my_token", "user.api_token"])
def test_a_token_that_is_none_of_a_text_is_refused(name):
    with pytest.raises(PlanError, match="credential"):
        refuse_secret(name, "x7f4c9d2a1b8")


HIDDEN = [
    ("data.path", "https://me:hunter2@host/x"),
    ("user.u", "redis://:hunter2@host:6379/0"),
    ("user.u", "https://host/x?access_token=abcdef123"),
    ("user.u", "https://b.host/k?X-Amz-Signature=abc123def456"),
    ("user.u", "https://x.host/?sv=1&sig=abcd%2Fefg"),
    ("user.h", "Authorization: Bearer abcdef"),
    ("user.h", "Bearer abc.1234567890abcdef"),
    ("user.c", "host=db password=hunter2 user=x"),
    ("user.c", "AccountKey=abcdef12345==;Endpoint=x"),
    ("user.c", "curl --token abcdef12345"),
    ("user.c", "mysql --password=hunter22"),
    ("user.c", '{"password": "hunter22"}'),
    ("cluster.setup", "wandb login 0123456789abcdef0123456789abcdef01234567"),
    ("user.k", "-----BEGIN RSA PRIVATE KEY-----\nabc"),
    ("user.k", "npm_012345678901234567890123456789abcdef"),
    ("user.k", "nvapi-0123456789abcdefghijklmn"),
    ("user.k", "SG.0123456789abcdefgh.0123456789abcdefgh"),
    ("user.hf_abcdefghijklmnopqrstuv", "1"),
    ("user.apiKey", "x"), ("user.accessToken", "x"), ("user.dbPassword", "x"),
    ("user.db-password", "x"), ("user.passwords", "x"), ("user.password2", "x"),
    ("user.cookie", "x"), ("user.jwt", "x"), ("user.webhook_url", "x"), ("PGPASSWORD", "x"),
    ("MYSQL_PWD", "x"), ("user.github_pat", "x"), ("user.wandb_key", "x"), ("user.dsn", "x"),
]  # fmt: skip
PLAIN = [
    ("data.path", "s3://bucket/0123456789abcdef0123456789abcdef01234567/x"),
    ("generate.prompt", "Basic understanding of bearer bonds; the password is asked for"),
    ("user.note", "see https://host:8080/x@y and http://h/x?sort_key=name&page=2"),
    ("user.git", "https://git@github.com/x/y"),
    ("cluster.setup", "export WANDB_API_KEY=$(cat ~/.key)"),
    ("cluster.setup", "source /opt/token/env.sh"),
    ("user.image", "docker://nvcr.io/nvidia/pytorch:24.01-py3"),
    ("user.password_file", "/run/secrets/x"), ("user.sort_key", "name"), ("user.key", "x"),
    ("user.tokens", "[1,2]"), ("user.author", "me"), ("user.compat", "x"), ("user.keyboard", "us"),
]  # fmt: skip


def _refused(name: str, value: str) -> str:
    try:
        refuse_secret(name, value)
    except PlanError as error:
        return str(error)
    return ""


def test_credentials_are_known_by_name_by_shape_and_inside_of_texts():
    said = {pair: _refused(*pair) for pair in HIDDEN}
    assert not [pair for pair, text in said.items() if "credential" not in text]
    assert not [pair for pair, text in said.items() if len(pair[1]) > 3 and pair[1] in text]
    assert "hf_" not in said["user.hf_abcdefghijklmnopqrstuv", "1"]
    assert not [pair for pair in PLAIN if _refused(*pair)]


def test_a_secret_is_masked_however_a_text_spells_it():
    lines = "-----BEGIN RSA PRIVATE KEY-----\nMIIEpAIBAAKCAQEA7\nabcdefghijklmnopqrst\n---"
    environment = {
        "A_TOKEN": "/K7MDENG/bPxRfiCYEX", "DB_PASSWORD": "hunter2", "PEM_KEY": lines,
        "Q_SECRET": "pa\"ss\\wo'rd\tx", "U": "https://me:p%40ss!w@h",
        "AZ_CONNECTION_STRING": "Endpoint=x;AccountKey=abcdefgh", "PATH": "/usr/bin",
    }  # fmt: skip
    spelt = [str(environment), json.dumps(environment), urllib.parse.urlencode(environment)]
    spelt += ["\n".join(f"{name}={value}" for name, value in environment.items())]
    spelt += [line for value in environment.values() for line in value.splitlines()]
    text = mask("\n".join(spelt), environment)
    for part in ("K7MD", "hunter2", "MIIE", "abcdefgh", "wo'rd", "wo%27rd", "ss!w", "ss%21w"):
        assert part not in text
    assert "/usr/bin" in text
    found = mask(
        "https://h/?api_key=abcdef123&x=1 authorization: Bearer abcdef1 hf_" + "a" * 20, {}
    )
    assert found == "https://h/?api_key=***&x=1 authorization: *** ***"
    assert mask("token: hello_world, bearer of news", {}) == "token: hello_world, bearer of news"


def test_bytes_that_are_printed_are_masked(monkeypatch):
    monkeypatch.setenv("MY_TOKEN", CANARY)
    below = io.TextIOWrapper(io.BytesIO())
    MaskedStream(below).buffer.write(f"it is {CANARY}\n".encode())
    below.seek(0)
    assert below.read() == "it is ***\n"


def test_a_number_is_no_password():
    with pytest.raises(PlanError, match="credential"):
        refuse_secret("user.password", "1234")
