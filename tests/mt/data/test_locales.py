import pytest

from gshard.mt.data.locales import in_script, language_of, language_of_path, scripts_of


@pytest.mark.parametrize(
    ("locale", "language"),
    [
        ("pt_BR", "pt"),
        ("pt-br", "pt"),
        ("sr@latin", "sr"),
        ("zh_TW", "zh_Hant"),
        ("zh-Hant-HK", "zh_Hant"),
        ("zh_CN.UTF-8", "zh"),
        ("cmn_hans", "zh"),
        ("iw", "he"),
        ("in", "id"),
        ("no", "nb"),
        ("deu", "de"),
        ("es-419", "es"),
        ("ku_IQ", "ckb"),
        ("ast", "ast"),
        ("en_GB", None),
        ("C", None),
        ("qqq", None),
        ("templates", None),
        ("", None),
    ],
)
def test_locale_names(locale, language):
    assert language_of(locale) == language


@pytest.mark.parametrize(
    ("path", "language"),
    [
        ("usr/share/locale/de/LC_MESSAGES/app.mo", "de"),
        ("usr/share/locale/sr@latin/LC_MESSAGES/app.mo", "sr"),
        ("share/app/translations/app_pt_BR.qm", "pt"),
        ("share/app/qt_zh_TW.qm", "zh_Hant"),
        ("share/po/fr.po", "fr"),
        ("share/fet/fet_ar.qm", "ar"),
        ("share/app/qt_de.qm", "de"),
        ("share/app/qt_en.qm", None),
        ("share/psi/psi_sr@latin.qm", "sr"),
        ("share/app/pt_br.qm", "pt"),
        ("share/app/zh_tw.qm", "zh_Hant"),
        ("share/app/yue_hk.qm", "yue"),
        ("app/locale/uk/messages.po", "uk"),
        ("addons/resource.language.ru_ru/strings.po", "ru"),
        ("share/locale/en_GB/LC_MESSAGES/app.mo", None),
        ("share/app/messages.mo", None),
    ],
)
def test_paths(path, language):
    assert language_of_path(path) == language


def test_scripts():
    assert scripts_of("de") == ("latin",)
    assert in_script("el", "Άνοιγμα αρχείου")
    assert not in_script("el", "Open file")
    assert in_script("ja", "ファイルを開く")
    assert not in_script("de", "123")
