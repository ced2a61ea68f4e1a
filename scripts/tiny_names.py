"""Random names, entities, values and phrases for the open worlds of palestra/tiny.

Most are composed at random from syllables, so that a model can only handle them by copying.
"""

from __future__ import annotations

import random

import tiny_words as words

from palestra.demo import is_held_out_price

SYLLABLES = (
    "a al am an ap ar as at au ba bal ban bar bel ber bi bo bon bra bri bu by ca cal can car cas cen cer cha che cho "
    "ci cle cli co col com con cor cra cre cro cu cul cur da dal de del den der des di din dis do dom don dor dra du "
    "dy e ed el em en ence ent er ern es ev ex fa fac fal fe fer fi fil fin fla fle fo for fra fre fro ful ga gan gar "
    "ge gel gen ger gi gla go gra gre gro gu ha hal han har he hel hen her hi ho hol hom hor hu ic id ie il im in ing "
    "ion ip is ish ist ite ity ive ja je jo ju ka kan ke kel ker ki kin kle ko ku la lan land lar le lec lem len ler "
    "les less let ley li lin line lo lock lon lor low lu ly ma mal man mar mas mat me men ment mer met mi min mis mo "
    "mon mor mous mu mul na nal nar nat ne nec ned nel ner ness net ni nic nin no nol nor nu o ob of ol om on op or "
    "ot ous out over pa pan par pas pe pel pen per pet ph pi pin pla ple po pol pon por pos pra pre pri pro pu ra ral "
    "ran rat re rec red rel ren res ri ric rin ro rol ron ry sa sal san sar sat sca se sec sel sen ser set sha she "
    "shi si sig sin sion so sol som son sor sta ste sten ster stra stre sub sul sun sup sur ta tab tal tan tar te tec "
    "tel tem ten ter ters th the ther ti tic tim tin tion to tol ton tor tra tre tri tro tu tur ture ty ul um un up "
    "ur us ut va val van var ve vel ven ver vi vil vin vo vol wa wal war way we wel wen wer wi win wo wood work y ya "
    "za zo"
).split()
ONSETS = (
    "b bl br c ch chr cl cr d dr dw f fl fr g gh gl gn gr h j k kl kn kr l m n p ph pl pr q qu r rh s sc sch scr sh "
    "shr sk sl sm sn sp sph spl spr squ st str sw t th thr tr tw v w wh wr x y z"
).split() + [""] * 6
VOWELS = "a e i o u a e i o u y ae ai ao au ay ea ee ei eo eu ew ey ia ie io oa oe oi oo ou ow oy ua ue ui uy".split()
CODAS = (
    "b bb ck ct d dd dge ff ft g gg ght gn gue k ke l lb ld lf lk ll lm lp lt m mb me mp n nce nch nd ne ng nge nk nt "
    "p pe pp pt que r rb rch rd rg rk rl rm rn rp rr rs rt rth s se sh sk sp ss st t tch te th ts tt v ve w wn x xt y "
    "z zz"
).split() + [""] * 30
LETTERS = "abcdefghijklmnopqrstuvwxyz"
ATTRIBUTES = (
    "level size rank grade limit score mark share height width depth label group type class floor street page line "
    "point side step area zone speed power charge fee tax debt income salary budget profit output demand supply load "
    "dose length colour owner number total value sum count date day hour cause effect result"
).split()
SHORT_ARGUMENTS = "a b c x y z n m k v p q s t i j id key name of to who what text kind".split()
VERBS = "get find fetch read show lookup check query give tell search list".split()
FILLERS = (
    "the a an of in on at by for to with from and or is are was be it this that which what who how when where can "
    "could will would should do does did has have had not no all any each every one two more most some please now "
    "then here there up down out about only just very much many long old good new last next first after before than "
    "as if so we you I they he she our your their its use need want know say see give make take come go"
).split()
DESCRIPTION_FORMS = (
    "Look up the {t}.",
    "Look up the {t} of a {k}.",
    "Get the {t} of one {k}.",
    "Return the {t} for a {k}.",
    "The {t} of a {k}.",
    "Find out the {t}.",
    "How much {t} a {k} has.",
    "Gives the {t} of the {k}.",
    "{t} by {k}.",
    "Tells the {t}.",
)
INSTRUCTION_FORMS = (
    "You are {r}. Use the tools to answer.",
    "You are a helpful {r}.",
    "You work for {r}. Look things up with the tools.",
    "Answer questions about {r}. Use the tools.",
    "Use the tools to answer questions about {r}.",
    "You help with {r}. Answer with one sentence.",
    "You are {r}. Never guess: call a tool first.",
    "You answer questions of {r}. Give the number only.",
    "Help people of {r}. Always use the tools before you answer.",
    "You are the assistant of {r}. Be brief and exact.",
)
CLAUSES = (
    "Hello!",
    "Hi,",
    "Please help me.",
    "I have a question.",
    "Quick question:",
    "Be brief.",
    "Answer with the number only.",
    "Thank you.",
    "I need to know this.",
)


def word(rng: random.Random) -> str:
    """A made-up lower-case word of one to four syllables, of English syllables or of any letters."""
    kind = rng.random()
    if kind < 0.15:
        return words.made_up_word(rng)
    if kind < 0.45:
        count = rng.choice((1, 1, 2))
        return "".join(rng.choice(ONSETS) + rng.choice(VOWELS) + rng.choice(CODAS) for _ in range(count))
    if kind < 0.55:
        return "".join(rng.choice(LETTERS) for _ in range(rng.randint(2, 7)))
    count = rng.choices((1, 2, 3, 4), (1, 5, 4, 1))[0]
    return "".join(rng.choice(SYLLABLES) for _ in range(count))


def noun(rng: random.Random) -> str:
    """A noun for questions and names: mostly made up."""
    return word(rng) if rng.random() < 0.65 else rng.choice(rng.choice((ATTRIBUTES, words.PLAIN_WORDS)))


def tool_name(rng: random.Random, attribute: str) -> str:
    """A name in snake_case or camelCase that often, but not always, has the attribute in it."""
    parts = (attribute if rng.random() < 0.6 else noun(rng)).split()
    form = rng.random()
    if form < 0.3:
        parts.insert(0, rng.choice((rng.choice(VERBS), word(rng), _part(rng))))
    elif form < 0.5:
        parts.append(rng.choice(("of", "for", "by", _part(rng), _part(rng), noun(rng))))
    elif form < 0.57:
        parts = [_part(rng), *parts, _part(rng)]
    return _identifier(rng, parts)


def argument_name(rng: random.Random) -> str:
    """An argument name: a short one, a word, or two words."""
    kind = rng.random()
    if kind < 0.2:
        return rng.choice(SHORT_ARGUMENTS)
    return _identifier(rng, [noun(rng)] if kind < 0.75 else [_part(rng), noun(rng)])


def argument_pair(rng: random.Random) -> tuple[str, str]:
    """Two different argument names, often with a part in common."""
    stem, kind = argument_name(rng), rng.random()
    if kind < 0.15:
        return f"{stem}1", f"{stem}2"
    if kind < 0.22:
        return f"{stem}_1", f"{stem}_2"
    if kind < 0.3:
        return f"{stem}_a", f"{stem}_b"
    if kind < 0.38:
        return f"{word(rng)}_{stem}", f"{word(rng)[::-1]}_{stem}"
    other = argument_name(rng)
    return (stem, other) if other != stem else ("a", "b")


def _part(rng: random.Random) -> str:
    """A part of an identifier, which may be a common word."""
    return rng.choice(FILLERS).lower() if rng.random() < 0.3 else noun(rng)


def _identifier(rng: random.Random, parts: list[str]) -> str:
    if rng.random() < 0.05:
        parts = [*parts[:-1], parts[-1] + str(rng.randint(1, 9))]
    if rng.random() < 0.06:
        return parts[0] + "".join(part.capitalize() for part in parts[1:])
    return "_".join(parts)


def sentence(rng: random.Random) -> str:
    """A sentence of common and made-up words that means nothing."""
    count = rng.randint(3, 10)
    text = " ".join(word(rng) if rng.random() < 0.45 else rng.choice(FILLERS) for _ in range(count))
    return text[0].upper() + text[1:] + rng.choice((".", ".", ".", "!", ":"))


def description(rng: random.Random, attribute: str, key: str) -> str:
    """A tool's description: about its attribute, about nothing, or empty."""
    kind = rng.random()
    if kind < 0.65:
        text = rng.choice(DESCRIPTION_FORMS).format(t=attribute, k=key)
        text = text[0].upper() + text[1:]
        return f"{text} {sentence(rng)}" if rng.random() < 0.1 else text
    return sentence(rng) if kind < 0.85 else ""


def instructions(rng: random.Random) -> str:
    kind = rng.random()
    if kind < 0.3:
        return rng.choice([text for text in words.INSTRUCTIONS if "shop" not in text])
    if kind < 0.75:
        who = " ".join(rng.choice((word(rng), rng.choice(FILLERS))) for _ in range(rng.randint(1, 3)))
        text = rng.choice(INSTRUCTION_FORMS).format(r=rng.choice(("", "a ", "the ")) + who)
        return f"{text} {sentence(rng)}" if rng.random() < 0.15 else text
    return " ".join(sentence(rng) for _ in range(rng.choice((1, 1, 2, 3))))


# Entities: what a question names and an argument takes.


def thing(rng: random.Random) -> str:
    count = rng.choices((1, 2, 3), (5, 4, 1))[0]
    return " ".join(noun(rng) for _ in range(count))


def proper_name(rng: random.Random) -> str:
    if rng.random() < 0.15:
        return rng.choice(rng.choice((words.PEOPLE, words.CITIES, words.COUNTRIES)))
    count = rng.choices((1, 2, 3), (6, 3, 0.5))[0]
    return " ".join(word(rng).capitalize() for _ in range(count))


def code(rng: random.Random) -> str:
    """A short code such as A-17, QX204, b7, 12-C."""
    letters = "".join(rng.choice("ABCDEFGHIJKLMNOPQRSTUVWXYZ") for _ in range(rng.choice((1, 1, 2, 3))))
    if rng.random() < 0.15:
        letters = letters.lower()
    digits = str(integer(rng))
    if rng.random() < 0.1:
        return letters + rng.choice(("", "-")) + rng.choice("ABCDEFGHIJKLMNOPQRSTUVWXYZ")
    parts = [letters, digits] if rng.random() < 0.85 else [digits, letters]
    return rng.choice(("-", "-", "", " ", "/")).join(parts)


def numbered(rng: random.Random) -> str:
    """Something with a number, such as 'lane 4'."""
    head = noun(rng)
    return f"{head.capitalize() if rng.random() < 0.4 else head} {integer(rng)}"


# Values: what tools return, and numbers in questions.


def integer(rng: random.Random) -> int:
    """One to five digits; never one of the demo's held-out prices."""
    digits = rng.choices((1, 2, 3, 4, 5), (3, 5, 4, 2, 1))[0]
    while True:
        value = rng.randrange(10 ** (digits - 1) if digits > 1 else 1, 10**digits)
        if digits > 1 and rng.random() < 0.05:
            value = int(str(value)[0] * digits)  # equal digits are the hardest to copy
        elif digits > 1 and rng.random() < 0.15:
            value = value // 10 * 10
        if not is_held_out_price(value):
            return value


def lead_in(rng: random.Random) -> str:
    """A clause before the question that names something beside the point."""
    form = rng.choice(
        ("On {x}", "In {x},", "For {x}:", "It is {x}.", "I am at {x}.", "{x} says:", "We want {x}.", "{s}")
    )
    return form.format(x=rng.choice((proper_name, noun, word))(rng), s=sentence(rng))


def small(rng: random.Random) -> int:
    return rng.randint(2, 9) if rng.random() < 0.7 else integer(rng)


def decimal(rng: random.Random) -> float:
    """A number with one or two decimals, none of whose halves is a held-out price."""
    whole = rng.choice((0, integer(rng), integer(rng)))
    while True:
        fraction = rng.randint(1, 9) if rng.random() < 0.5 else rng.randint(1, 99)
        text = f"{whole}.{fraction}"
        if fraction % 10 and not is_held_out_price(fraction):
            return float(text)


def time_of_day(rng: random.Random) -> str:
    minute = rng.choice([m for m in range(0, 60) if not is_held_out_price(m)])
    hour = rng.choice([h for h in range(0, 24) if not is_held_out_price(h)])
    return f"{hour:02d}:{minute:02d}" if rng.random() < 0.7 else f"{hour}:{minute:02d}"


def phrase(rng: random.Random) -> str:
    """A value of one to three words."""
    kind = rng.random()
    if kind < 0.4:
        return noun(rng)
    if kind < 0.7:
        return proper_name(rng)
    return " ".join(noun(rng) for _ in range(rng.choice((2, 2, 3))))
