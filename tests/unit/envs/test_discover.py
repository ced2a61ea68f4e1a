"""Environments are found by reading, never by running."""

import os
import textwrap
from pathlib import Path

import pytest

from palestra.core.errors import NotFoundError, PalestraError, SettingError, UnsupportedError, UserCodeError
from palestra.envs import discover as discovery
from palestra.envs.discover import discover, find_env, in_file, load_env, package_of, read_source
from palestra.extras.agent_tools.config_fields import describe_env


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)

    def make(name: str, text: str) -> Path:
        path = tmp_path / "environments" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text))
        return path

    return make


def configured() -> list:
    return [env for env in discover().environments if env.origin == "configured"]


def test_a_subclass_is_found_with_its_name_config_and_first_line(write):
    path = write(
        "sums.py",
        '''
        raise SystemExit("nobody may run this for a listing")
        from palestra import Env

        class Sums(Env):
            """
            Add numbers.

            At length.
            """
            name = "my-sums"
            env_config_cls = SumsConfig

        class Unrelated:
            pass
        ''',
    )
    (env,) = configured()
    assert (env.name, env.class_name, env.file_path, env.description, env.config_class) == (
        "my-sums", "Sums", path, "Add numbers.", "SumsConfig",
    )  # fmt: skip


@pytest.mark.parametrize(
    "text",
    [
        "import palestra\nclass A(palestra.Env): ...",
        "import palestra as p\nclass A(p.Env): ...",
        "from palestra.envs.env import Env as E\nclass A(E): ...",
        "from palestra import envs\nimport palestra.envs.env\nclass A(palestra.envs.env.Env): ...",
        "from atroposlib.envs.base import BaseEnv\nclass A(BaseEnv): ...",
        "from palestra import Env\nclass _B(Env): ...\nclass A(_B): ...",
        "from palestra import Env\ntry:\n    class A(Env): ...\nexcept ValueError: ...",
        "from _common import Base\nclass A(Base): ...",
        "from ._common import Base\nclass A(Base): ...",
        "from . import _common\nclass A(_common.Base[int]): ...",
        "from _common import *\nclass A(Base): ...",
        "from _again import Base\nclass A(Base): ...",
        pytest.param(
            "from palestra.extras.environments.calculator import Calculator\nclass A(Calculator): ...",
            marks=pytest.mark.extras,
        ),
    ],
)
def test_bases_are_followed_through_imports_and_files(write, text):
    write("_common.py", "from palestra import Env\nclass Base(Env): ...\nclass Hidden(Env): ...")
    write("_again.py", "from _common import Base")
    write("a.py", text)
    assert [env.class_name for env in configured()] == ["A"]


def test_of_the_files_around_an_environment_only_the_homes_of_its_bases_are_read(write, monkeypatch):
    write("_common.py", "from palestra import Env\nclass Base(Env): ...")
    write("unrelated.py", "from palestra import Env\nclass Other(Env): ...")
    path = write("mine.py", "import json\nfrom pydantic import BaseModel\nfrom _common import Base\n"
                 "class Config(BaseModel): ...\nclass Mine(Base): ...")  # fmt: skip
    read = []
    monkeypatch.setattr(discovery, "read_source", lambda path: read.append(path.name) or read_source(path))
    assert [env.class_name for env in in_file(path)] == ["Mine"]
    assert read == ["mine.py", "_common.py"]


def test_atropos_environments_are_recognised_also_by_a_base_that_another_module_re_exports(write):
    write("my_base.py", "from atroposlib.envs.base import BaseEnv, BaseEnvConfig\n")
    write("other.py", "from somewhere import BaseEnv\n")
    write("foreign.py", "from other import BaseEnv\nclass No(BaseEnv): ...")
    path = write("mine.py", "from my_base import BaseEnv\nclass Gsm(BaseEnv): ...")
    assert [(env.name, env.dialect) for env in configured()] == [("gsm", "atropos")]
    with pytest.raises(UnsupportedError, match="written for atropos"):
        load_env(str(path))


def test_bases_of_others_circles_and_namesakes_of_another_library_are_no_environments(write):
    write("base.py", "from palestra import Env\nclass Base(Env): ...")
    write("two.py", "from base import Base\nclass One(Base): ...\nclass Two(Base): ...")
    write("c.py", "from some_library import Calculator\nclass C(Calculator): ...")
    write("a.py", "from b import B\nclass A(B): ...")
    write("b.py", "from a import A\nclass B(A): ...")
    assert [env.name for env in configured()] == ["one", "two"]


def test_files_that_cannot_be_read_are_reported_and_the_rest_listed(write):
    broken = write("broken.py", "class A(Env:")
    binary = write("binary.py", "")
    binary.write_bytes(b"\x00\xff")
    pipe, device = (binary.with_name(name) for name in ("pipe.py", "zero.py"))
    os.mkfifo(pipe)
    device.symlink_to("/dev/zero")
    write("good.py", "from palestra import Env\nclass Good(Env): ...")
    found = discover()
    assert "good" in [env.name for env in found.environments]
    assert set(found.errors) == {broken, binary, pipe, device}
    assert "line 1" in found.errors[broken]
    with pytest.raises(NotFoundError, match=r"broken\.py: line 1"):
        found.named("broken")


def test_installed_packages_and_a_variable_announce_environments(write, tmp_path, monkeypatch):
    package = tmp_path / "site" / "their_package"
    (package / "deep").mkdir(parents=True)
    (package / "__init__.py").write_text("raise SystemExit('imported')")
    (package / "deep" / "__init__.py").touch()
    (package / "deep" / "game.py").write_text("from palestra import Env\nclass Game(Env): ...\nclass Other(Env): ...")
    info = tmp_path / "site" / "their_package-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: their-package\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[palestra.environments]\ngame = their_package.deep.game:Game\n")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    assert [env.name for env in discover().environments if env.origin == "installed"] == ["game"]
    other = tmp_path / "other"
    other.mkdir()
    (other / "x.py").write_text("from palestra import Env\nclass X(Env): ...")
    monkeypatch.setenv("PALESTRA_ENV_PATH", str(other))
    assert [env.name for env in configured()] == ["x"]


FIELDS = '''
from palestra import Env, EnvConfig
import enum
import os
print("noise on stdout")

class Handling(enum.Enum):
    STOP = "STOP_TRAIN"

class Config(EnvConfig):
    """More."""
    handling: Handling = Handling.STOP
    level: int = 1
    note: str = ""

class Levels(Env):
    env_config_cls = Config

    @classmethod
    def config_init(cls):
        return Config(level=7, note=os.environ.get("MY_SECRET", "nothing"))
'''


def test_config_fields_have_the_environments_own_values_and_never_our_secrets(write, monkeypatch):
    monkeypatch.setenv("MY_SECRET", "sesame")
    (env,) = in_file(write("levels.py", FIELDS))
    fields = {row["name"]: row for row in describe_env(env).fields}
    assert {"name": "level", "type": "int", "default": 7, "description": ""}.items() <= fields["level"].items()
    assert fields["level"]["schema"]["type"] == "integer"
    assert fields["note"]["default"] == "nothing"
    assert fields["handling"]["default"] == "STOP_TRAIN"
    assert fields["train_size"]["default"] == 1000


def test_a_config_that_hangs_or_raises_is_told(write):
    (hanging,) = in_file(write("slow.py", FIELDS.replace("import os", "import os, time; time.sleep(60)")))
    with pytest.raises(UserCodeError, match=r"took longer than 0\.5 s.*limits\.config_minutes"):
        describe_env(hanging, timeout_s=0.5)
    (raising,) = in_file(write("bad.py", FIELDS.replace("level=7", "level='high'")))
    with pytest.raises(UserCodeError, match="cannot be read"):
        describe_env(raising)


@pytest.mark.parametrize(
    ("statement", "package", "roots"),
    [
        ("from .words import WORDS", "game", ["environments"]),
        ("from ..shared import WORDS", "environments.game", ["."]),
        ("def f():\n    from .words import WORDS", "game", ["environments"]),
        ("try:\n    from .words import WORDS\nexcept ImportError:\n    from words import WORDS", "", []),
        ("from environments.shared import WORDS", "", ["."]),
        ("import environments.shared", "", ["."]),
        ("import json", "", []),
        ("from .words import", "", []),  # running it says what is wrong
    ],
)
def test_the_package_of_a_file_is_what_its_imports_need(write, tmp_path, statement, package, roots):
    path = write("game/main.py", statement)
    assert package_of(path) == (package, [(tmp_path / root).resolve() for root in roots])
    write("game/__init__.py", "")
    write("__init__.py", "")
    if package == "game":  # it reaches up to the last folder with an __init__.py
        assert package_of(path) == ("environments.game", [tmp_path])


def test_the_config_of_a_file_with_relative_imports_is_read(write):
    write("game/words.py", "LEVEL = 9")
    relative = FIELDS.replace("import os", "import os\nfrom .words import LEVEL").replace("level=7", "level=LEVEL")
    for name in ("main.py", "game.py"):  # the latter has the name of its folder
        (env,) = in_file(write(f"game/{name}", relative))
        assert {row["name"]: row["default"] for row in describe_env(env).fields}["level"] == 9


def test_an_environment_is_loaded_by_file_class_or_name(write):
    path = write(
        "levels.py", FIELDS + "\nclass More(Levels):\n    name = 'more'\n    def score(self, a): return True\n"
    )
    path.write_text(path.read_text().replace("class Levels(Env):", "class Levels(Env):\n    name = 'levels'"))
    with pytest.raises(SettingError, match="several environments; name one"):
        find_env(str(path))
    assert load_env(f"{path}:More", {"level": "3"}).env.config.level == 3
    assert load_env("more").name == "more"


@pytest.mark.parametrize(
    ("name", "settings", "words"),
    [
        ("calculater", {}, "Did you mean 'calculator'"),
        ("nowhere.py", {}, "no environment file nowhere.py"),
        ("calculator", {"levle": 1}, "unknown setting 'env.levle'"),
        ("calculator", {"train_size": "many"}, "train_size"),
    ],
)
def test_mistakes_are_told_with_their_remedy(name, settings, words):
    with pytest.raises(PalestraError, match=words):
        load_env(name, settings)


def test_lists_and_objects_are_given_as_json(write):
    path = write("levels.py", FIELDS.replace('note: str = ""', 'note: str = ""\n    names: dict[str, int] = {}'))
    assert load_env(str(path), {"names": '{"a": 1}', "note": "[not JSON"}).env.config.names == {"a": 1}
    with pytest.raises(SettingError, match="names"):
        load_env(str(path), {"names": "{a"})
