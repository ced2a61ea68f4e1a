"""What may be seen of the environment."""

from palestra.core.secrets import clean_environment, own_environment, redact

ENVIRON = {
    "PATH": "/bin",
    "HF_HOME": "/cache",
    "HF_TOKEN": "hf_0123456789",
    "OPENROUTER_API_KEY": "or-0123456789",
    "MY_PLAN": "invade",
    "TOKENIZERS_PARALLELISM": "false",
    "PALESTRA_TOKEN": "short",
}


def test_a_program_of_others_sees_what_is_harmless_and_what_it_was_promised():
    seen = clean_environment(environ=ENVIRON).keys()
    assert seen == {"PATH", "HF_HOME", "TOKENIZERS_PARALLELISM"}
    assert "OPENROUTER_API_KEY" in clean_environment(["OPENROUTER_API_KEY"], ENVIRON)
    passing = clean_environment(environ=ENVIRON | {"PALESTRA_PASS_ENV": "HF_TOKEN, MY_PLAN"}).keys()
    assert passing - seen == {"HF_TOKEN", "MY_PLAN", "PALESTRA_PASS_ENV"}


def test_our_own_process_sees_all_but_the_servers_token_and_what_is_hidden():
    assert ENVIRON.keys() - own_environment(environ=ENVIRON).keys() == {"PALESTRA_TOKEN"}
    assert "HF_TOKEN" not in own_environment(["HF_TOKEN"], ENVIRON)
    assert "HF_TOKEN" in own_environment(["HF_TOKEN"], ENVIRON | {"PALESTRA_PASS_ENV": "HF_TOKEN"})


def test_secrets_are_replaced_by_their_names_and_ordinary_words_are_left():
    text = redact("key or-0123456789 in a short text", ENVIRON)
    assert text == "key [OPENROUTER_API_KEY] in a short text"
