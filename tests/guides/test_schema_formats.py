"""Formats: what a guide admits the judge accepts, and the spellings people use are admitted.

The judge is the `FormatChecker` of draft 2020-12: the one without a draft reads "time" as draft 3 did, without an offset.
"""

import json
import random

import jsonschema
import pytest

from gd_plugin.guides.schema.formats import FORMATS
from tests.fuzz import pick
from tests.schemas import Texts, walk

pytest.importorskip("llguidance")

JUDGE = jsonschema.Draft202012Validator.FORMAT_CHECKER
USUAL = {
    "date": ["2024-02-29", "1999-12-31"],
    "time": ["12:00:00Z", "23:59:59.123+05:30", "00:00:00-00:00"],
    "date-time": ["2024-01-01T00:00:00Z", "2024-01-01t00:00:00.5z"],
    "duration": ["P1Y", "P1Y2M3DT4H5M6S", "PT1S", "P1W", "P4DT12H30M5S"],
    "email": ["a@b", "joe.bloggs@example.com", '"joe bloggs"@example.com', "user+tag@sub.example.co.uk"],
    "idn-email": ["joe@example.com"],
    "hostname": ["www.example.com", "localhost", "xn--4gbwdl.xn--wgbh1c", "123.example", "1host", "a-b.c1"],
    "idn-hostname": ["example.com", "a-b.example"],
    "ipv4": ["1.2.3.4", "255.255.255.255"],
    "ipv6": ["::1", "::", "1:2:3:4:5:6:7:8", "::ffff:192.168.0.1", "12:34::56:78"],
    "uri": ["http://a.com", "https://a.b:80/x?y=z#w", "urn:isbn:1", "mailto:a@b.c", "ldap://[2001:db8::7]/c=GB?one"],
    "uri-reference": ["/a", "#f", "a/b", "", "//a.b/?c=d"],
    "iri": ["http://\u0192\u00f8\u00f8.\u00dfar/?\u2202=\u03c0"],
    "iri-reference": ["/\u00e9"],
    "uri-template": ["http://a.b/{term:1}/{term}", "{?q*}", "{+path,x}/here"],
    "uuid": ["123e4567-e89b-12d3-a456-426614174000"],
    "json-pointer": ["", "/foo/0", "/a~1b"],
    "relative-json-pointer": ["1", "0/foo", "2#", "10/a"],
    "color": ["red", "#fff", "#abcdef"],
}
NEVER = {
    "date": ["2023-02-29", "2024-13-01", "0000-01-01", "2024-1-1"],
    "time": ["25:00:00Z", "12:00:00", "12:60:00Z"],
    "date-time": ["2024-01-01", "2024-01-01T24:00:00Z", "2024-19-01T00:00:00Z"],
    "duration": ["P", "PT", "1Y", "P1S"],
    "email": ["a", "@b", "a@"],
    "hostname": ["-a", "a-", "a_b", "a..b", "a" * 64],
    "ipv4": ["1.2.3", "256.1.1.1", "01.2.3.4"],
    "ipv6": ["1:2", ":::", "12345::", "::1%eth0"],
    "uri": ["a", "/a", "http://a b"],
    "uuid": ["123e4567e89b12d3a456426614174000", "x"],
    "json-pointer": ["a", "/~2"],
}


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_walks_end_in_what_the_judge_accepts(name):
    texts, rng = Texts({"type": "string", "format": name}), random.Random(5)
    for _ in range(pick(ci=12, long=1000)):
        texts.matcher.reset()
        text = walk(texts.matcher, rng, free=rng.choice([4, 20, 50]))
        assert text
        assert JUDGE.conforms(json.loads(text), name), text


@pytest.mark.parametrize("name", sorted(USUAL))
def test_usual_spellings(name):
    texts = Texts({"type": "string", "format": name})
    assert [value for value in USUAL[name] if not texts.admits(json.dumps(value))] == []
    assert [value for value in NEVER.get(name, []) if texts.admits(json.dumps(value))] == []
    assert all(JUDGE.conforms(value, name) for value in USUAL[name])
