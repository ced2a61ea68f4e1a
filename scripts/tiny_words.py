"""The words of palestra/tiny's synthetic dialogues, and how to draw from them."""

from __future__ import annotations

import random

from palestra.demo import ADJECTIVES, NOUNS, is_held_out_item, is_held_out_price

PEOPLE = (
    "Anna Ben Clara David Emma Felix Grace Hugo Ida Jonas Karl Lena Maria Nora Oscar Paul Rosa Sam Tom Vera".split()
)
CITIES = "Paris Rome Berlin Madrid Vienna Oslo Lima Cairo Tokyo Delhi Prague Dublin Boston Milan Bern".split()
COUNTRIES = "France Italy Spain Norway Peru Egypt Japan India Ireland Poland Brazil Kenya Chile Greece Cuba".split()
PLAIN_WORDS = (
    "water fire stone tree river house garden bread apple horse bird fish music paper window door night day winter "
    "summer road bridge ship train letter friend king queen doctor teacher story game"
).split()

INSTRUCTIONS = (
    "You work in a shop. Use the tools to answer.",
    "You are a shop assistant. Use the tools.",
    "Use the tools to answer.",
    "You are a helpful assistant.",
    "You are a helpful assistant. Use the tools.",
    "Answer the question with the tools.",
    "Be short. Look things up before you answer.",
    "Help the user. Answer in one sentence.",
    "You answer questions about a list.",
    "",
)

SMALL_TALK = (
    ("Hello!", "Hello! How can I help?"),
    ("Hi.", "Hi! What can I do for you?"),
    ("Good morning.", "Good morning! How can I help?"),
    ("How are you?", "I am fine, thank you."),
    ("Who are you?", "I am a small assistant."),
    ("What can you do?", "I can use tools to answer your questions."),
    ("Thank you.", "You are welcome."),
    ("Thanks, that helps.", "I am glad to help."),
    ("Goodbye.", "Goodbye!"),
    ("Bye!", "Bye! Have a nice day."),
    ("Yes.", "All right."),
    ("No.", "All right."),
)

_ONSETS = "b c d f g h j k l m n p r s t v w y z br ch cr dr fl gr pl pr sh st th tr".split()
_VOWELS = "a a e e i o o u ai ea ee ia oo ou".split()
_CODAS = ["", "", "", "l", "m", "n", "r", "s", "t", "x", "p", "ck", "d", "ng", "st", "rd"]


def made_up_word(rng: random.Random) -> str:
    """A word that no one has seen, such as 'zorvin'."""
    syllables = rng.choice((1, 2, 2, 3))
    return "".join(rng.choice(_ONSETS) + rng.choice(_VOWELS) + rng.choice(_CODAS) for _ in range(syllables))


def number(rng: random.Random) -> int:
    """A number of one to four digits, mostly two; never one of the demo's held-out prices."""
    digits = rng.choices((1, 2, 3, 4), (1, 8, 4, 0.5))[0]
    while True:
        value = rng.randrange(10 ** (digits - 1) + (digits == 1), 10**digits)
        if digits == 2 and rng.random() < 0.15:
            value = value % 9 * 11 + 11  # equal digits are the hardest to copy
        if not is_held_out_price(value):
            return value


def shop_item(rng: random.Random) -> str:
    """An item of the demo's catalogue that no held-out case asks for."""
    while True:
        adjective, noun = rng.choice(ADJECTIVES), rng.choice(NOUNS)
        if not is_held_out_item(adjective, noun):
            return f"{adjective} {noun}"


def any_item(rng: random.Random) -> str:
    """Something one can have: mostly a catalogue item, else a plain or made-up thing."""
    kind = rng.random()
    if kind < 0.6:
        return shop_item(rng)
    if kind < 0.65:
        return rng.choice(NOUNS)
    if kind < 0.8:
        return f"{rng.choice(ADJECTIVES)} {made_up_word(rng)}"
    if kind < 0.9:
        return f"{made_up_word(rng)} {rng.choice((made_up_word(rng), rng.choice(PLAIN_WORDS)))}"
    return made_up_word(rng)


def any_word(rng: random.Random) -> str:
    """A word for look-ups that give words."""
    if rng.random() < 0.4:
        word = made_up_word(rng)
        return word.capitalize() if rng.random() < 0.5 else word
    return rng.choice(rng.choice((PEOPLE, CITIES, COUNTRIES, PLAIN_WORDS, ADJECTIVES)))
