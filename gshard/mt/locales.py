"""Locale names to language codes: `pt_BR`, `sr@latin`, `zh-TW`, `iw` and `deu` become one spelling.

Catalogs name languages in five conventions, some of them long withdrawn. The code is ISO 639-1
where there is one, ISO 639-3 otherwise; Traditional Chinese is its own language (`zh_Hant`), since
it is written differently, and regional variants of the others are not.
"""

from __future__ import annotations

import functools
import re

# Withdrawn codes, codes of individual languages inside a macrolanguage, and plain mistakes.
_ALIASES = dict(
    pair.split("=")
    for pair in """
    iw=he in=id ji=yi no=nb tl=fil gug=gn kmr=ku cmn=zh swh=sw mo=ro jp=ja cz=cs dk=da gr=el ua=uk
    sp=es ike=iu zlm=ms arb=ar pes=fa plt=mg khk=mn azj=az lvs=lv ekk=et als=sq npi=ne ory=or
    ydd=yi ber=kab sh=sr scc=sr
    """.split()
)

# ISO 639-3 (and a few 639-2/B) to 639-1.
_TWO_LETTERS = dict(
    pair.split("=")
    for pair in """
    deu=de fra=fr spa=es ita=it por=pt rus=ru pol=pl nld=nl swe=sv dan=da fin=fi hun=hu ces=cs
    slk=sk slv=sl hrv=hr srp=sr bul=bg ron=ro ell=el tur=tr ukr=uk bel=be lit=lt lav=lv est=et
    heb=he ara=ar fas=fa hin=hi ben=bn tam=ta tel=te mal=ml kan=kn mar=mr guj=gu pan=pa urd=ur
    nep=ne sin=si tha=th vie=vi ind=id msa=ms jpn=ja kor=ko zho=zh cat=ca eus=eu glg=gl gle=ga
    gla=gd cym=cy bre=br isl=is mkd=mk sqi=sq kat=ka hye=hy aze=az kaz=kk uzb=uz kir=ky tgk=tg
    tuk=tk mon=mn khm=km lao=lo mya=my amh=am swa=sw zul=zu xho=xh afr=af yor=yo ibo=ig hau=ha
    som=so epo=eo lat=la oci=oc fao=fo ltz=lb mlt=mt bos=bs nno=nn nob=nb nor=nb jav=jv sun=su
    tgl=fil ori=or asm=as san=sa snd=sd pus=ps kur=ku uig=ug tat=tt bod=bo dzo=dz div=dv tir=ti
    orm=om kin=rw run=rn nya=ny sna=sn sot=st tsn=tn tso=ts ssw=ss ven=ve nbl=nr wol=wo lin=ln
    lug=lg mlg=mg mri=mi smo=sm ton=to fij=fj hat=ht que=qu aym=ay grn=gn cos=co srd=sc fry=fy
    wln=wa ido=io ina=ia kal=kl sme=se chv=cv bak=ba oss=os che=ce abk=ab glv=gv cor=kw ewe=ee
    aka=ak bam=bm ful=ff kik=ki lub=lu iku=iu sag=sg tah=ty roh=rm yid=yi
    """.split()
)

# Names that are no language to translate from: English itself, placeholders of tools, and
# invented languages whose catalogs are jokes.
_NO_LANGUAGE = frozenset(
    "c posix root xx x templates qps und mul zxx test en eng tlh jbo qqq".split()
)

_TRADITIONAL = frozenset(("tw", "hk", "mo", "hant"))
_CODE = re.compile(r"[a-z]{2,3}")


@functools.cache
def language_of(locale: str) -> str | None:
    """The language code of a locale name; None for English and for what is no language."""
    name = re.sub(r"\.(utf|iso).*$", "", locale.strip().replace("-", "_"), flags=re.I)
    name, _, modifier = name.partition("@")
    base, *subtags = name.lower().split("_")
    if base in _NO_LANGUAGE:
        return None
    code = _ALIASES.get(base, base)
    code = _TWO_LETTERS.get(code, code)
    if not _CODE.fullmatch(code):
        return None
    if code == "zh" and _TRADITIONAL.intersection(subtags):
        return "zh_Hant"
    if code == "ku" and ("iq" in subtags or "sorani" in subtags or "arab" in modifier.lower()):
        return "ckb"
    return code


_LOCALE = r"[a-z]{2,3}(?:[_-](?:[A-Za-z]{2}|[A-Za-z]{4}|\d{3}|[a-z]{5,8}))*(?:@[A-Za-z]+)?"
_LC_MESSAGES = re.compile(r"(?:^|/)([A-Za-z]{2,3}(?:[_@-][A-Za-z0-9@_-]+)?)/LC_MESSAGES/[^/]+$")
_RESOURCE = re.compile(r"/resource\.language\.([a-z]{2,3}(?:_[a-z]{2,4})?)/")
_REGION_SUFFIX = re.compile(r"(?:^|[-_.])([a-z]{2,3}[_-](?:[A-Z]{2}|[A-Z][a-z]{3})(?:@[a-z]+)?)$")
_SUFFIX = re.compile(r"(?:^|.*[-_.])([a-z]{2,3}(?:[_-][A-Za-z]{2,4})?(?:@[a-z]+)?)$")
_FOLDER = re.compile(
    rf"/(?:locale|locales|i18n|lang|po|translations)/({_LOCALE})/",
)


def language_of_path(path: str) -> str | None:
    """The language of a catalog file, from its folder (`de/LC_MESSAGES/`) or its name (`app_de.qm`)."""
    path = path.replace("\\", "/")
    for pattern in (_LC_MESSAGES, _RESOURCE):
        if match := pattern.search(path):
            return language_of(match[1])
    stem = path.rsplit("/", 1)[-1].rsplit(".", 1)[0]
    # The longest locale wins: `app_pt_BR` is pt_BR, not a locale named BR.
    for pattern in (_REGION_SUFFIX, _SUFFIX):
        if (match := pattern.search(stem)) and (code := language_of(match[1])):
            return code
    if match := _FOLDER.search("/" + path):
        return language_of(match[1])
    return None
