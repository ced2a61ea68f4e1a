"""Two look-ups, the second with the result of the first: a city's zone, and what a parcel to that zone costs."""

from palestra import Agent, EvalSuite, function_tool, measure

CITIES = "Turin Gdansk Bergen Porto Lyon Graz Split Tartu Malaga Aarhus Brno Cork".split()
ZONES = ["A1", "B4", "C7", "D2"]
PRICES = {"A1": 640, "B4": 815, "C7": 970, "D2": 1130}


@function_tool
def zone_of(city: str) -> str:
    """The delivery zone of a city."""
    return ZONES[CITIES.index(city) % 4]


@function_tool
def price_of(zone: str, kilograms: int) -> int:
    """The price in cents of a parcel of this weight to a zone."""
    return PRICES[zone] + 35 * kilograms


@measure
def right_price(ctx):
    return str(ctx.expect) in ctx.final_assistant_message.text


agent = Agent(
    "parcels",
    model="palestra/tiny",
    instructions="You work for a delivery service.",
    tools=[zone_of, price_of],
)
cases = [
    {
        "input": f"What does a parcel of {kilograms} kilograms to {city} cost?",
        "expect": PRICES[ZONES[i % 4]] + 35 * kilograms,
    }
    for i, city in enumerate(CITIES)
    for kilograms in (2, 3, 5, 8, 12, 17, 21)
]
suite = EvalSuite.from_records(cases, measures=[right_price])
