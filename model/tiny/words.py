"""The vocabulary of the synthetic dialogues: domains, names, attributes and sentence patterns, in English and Chinese.

Everything here is data. Names are single words so that a fact is known by (name, attribute); pairs such as
upper limit / lower limit stand beside each other because confusing them does harm.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Language = Literal["en", "zh"]
ValueKind = Literal["amount", "percent", "date", "bound", "code", "choice", "unless", "small"]


@dataclass(frozen=True, kw_only=True)
class Attribute:
    """One thing that can be known about a name. `choices` serves the kinds choice and unless, `unit` the numbers."""

    name: str
    kind: ValueKind
    unit: str = ""
    choices: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Domain:
    """Attributes of one field of work in one language."""

    name: str
    attributes: tuple[Attribute, ...]


@dataclass(frozen=True, kw_only=True)
class Phrases:
    """Sentence patterns of one language. {key} is "upper limit of Alder", {value} is "3500 USD"."""

    statements: tuple[str, ...]
    questions: tuple[str, ...]
    answer: str
    noted: str
    key: str
    at_most: str
    at_least: str
    date: str
    sum_question: str
    sum_answer: str
    percent_question: str
    percent_answer: str


_NAMES_EN = """
Alder Amber Anchor Aspen Atlas Basil Beacon Birch Bison Canyon Cedar Clover Cobalt Comet Copper Coral Cosmos
Crane Crystal Delta Dover Eagle Echo Ember Falcon Fern Finch Flint Forest Garnet Ginger Glacier Granite Harbor
Hazel Heron Indigo Iris Ivory Jade Jasper Juniper Kestrel Lagoon Lark Laurel Lemon Lilac Linden Lotus Lunar Lynx
Magnet Maple Marble Meadow Mercury Mint Nectar Noble Nova Oasis Ocean Olive Onyx Opal Orbit Orchid Otter Pearl
Pepper Pine Plaza Poplar Prism Quartz Raven Ridge River Robin Ruby Saffron Sage Sierra Silver Solar Sparrow
Spruce Stella Summit Tango Tiger Topaz Tulip Umber Velvet Violet Willow Zenith Zephyr
"""

_NAMES_ZH = """
青松 白桦 红枫 银杏 翠竹 紫藤 金桂 玉兰 海棠 茉莉 芙蓉 牡丹 秋菊 冬梅 春兰 夏荷 晨星 晚霞 朝阳 明月 流云
飞雪 清风 细雨 长河 远山 高原 平湖 深谷 古城 新桥 南岸 北岭 东港 西关 中原 天池 龙泉 凤凰 麒麟 白鹭 黑鹰
赤狐 灰狼 花鹿 金鱼 海豚 蓝鲸 猛虎 雄狮 琥珀 珊瑚 翡翠 玛瑙 水晶 珍珠 钻石 黄铜 白银 赤金 石英 花岗 火山
冰川 沙漠 绿洲 草原 森林 湿地 峡湾 北斗 南极 银河 彗星 火箭 卫星 灯塔 港湾 船锚 风帆 罗盘 铁塔 钟楼 石桥
木屋 竹亭 茶园 果林 麦田 稻香 琴弦 鼓楼 画廊 书院 墨香 丹青 宣纸 锦绣 丝路 瓷都
"""

NAMES: dict[Language, tuple[str, ...]] = {
    "en": tuple(_NAMES_EN.split()),
    "zh": tuple(_NAMES_ZH.split()),
}


def _en(name: str, kind: ValueKind, unit: str = "", *choices: str) -> Attribute:
    return Attribute(name=name, kind=kind, unit=unit, choices=choices)


_zh = _en

DOMAINS: dict[Language, tuple[Domain, ...]] = {
    "en": (
        Domain(
            name="banking",
            attributes=(
                _en("balance", "amount", " USD"),
                _en("upper limit", "amount", " USD"),
                _en("lower limit", "amount", " USD"),
                _en("rate", "percent"),
                _en("maturity", "date"),
                _en("deposit", "bound", " USD"),
                _en("passcode", "code"),
                _en("profile", "choice", "", "conservative", "aggressive"),
                _en("transfer", "unless", "", "blocked", "allowed"),
                _en("fee", "small", " USD"),
            ),
        ),
        Domain(
            name="public service",
            attributes=(
                _en("subsidy", "amount", " USD"),
                _en("upper limit", "amount", " USD"),
                _en("lower limit", "amount", " USD"),
                _en("share", "percent"),
                _en("deadline", "date"),
                _en("income", "bound", " USD"),
                _en("permit", "code"),
                _en("status", "choice", "", "approved", "rejected"),
                _en("entry", "unless", "", "blocked", "allowed"),
                _en("desk", "small"),
            ),
        ),
        Domain(
            name="machine diagnosis",
            attributes=(
                _en("speed", "amount", " rpm"),
                _en("upper limit", "amount", " kPa"),
                _en("lower limit", "amount", " kPa"),
                _en("load", "percent"),
                _en("service", "date"),
                _en("pressure", "bound", " kPa"),
                _en("fault", "code"),
                _en("valve", "choice", "", "open", "closed"),
                _en("restart", "unless", "", "blocked", "allowed"),
                _en("gear", "small"),
            ),
        ),
    ),
    "zh": (
        Domain(
            name="banking",
            attributes=(
                _zh("余额", "amount", "元"),
                _zh("上限", "amount", "元"),
                _zh("下限", "amount", "元"),
                _zh("利率", "percent"),
                _zh("到期日", "date"),
                _zh("存款", "bound", "元"),
                _zh("口令", "code"),
                _zh("风险类型", "choice", "", "保守型", "进取型"),
                _zh("转账", "unless", "", "禁止", "允许"),
                _zh("手续费", "small", "元"),
            ),
        ),
        Domain(
            name="public service",
            attributes=(
                _zh("补贴", "amount", "元"),
                _zh("上限", "amount", "元"),
                _zh("下限", "amount", "元"),
                _zh("比例", "percent"),
                _zh("截止日", "date"),
                _zh("收入", "bound", "元"),
                _zh("证号", "code"),
                _zh("审批", "choice", "", "通过", "驳回"),
                _zh("入场", "unless", "", "禁止", "允许"),
                _zh("窗口", "small", "号"),
            ),
        ),
        Domain(
            name="machine diagnosis",
            attributes=(
                _zh("转速", "amount", "转"),
                _zh("上限", "amount", "千帕"),
                _zh("下限", "amount", "千帕"),
                _zh("负载", "percent"),
                _zh("检修日", "date"),
                _zh("压力", "bound", "千帕"),
                _zh("故障码", "code"),
                _zh("阀门", "choice", "", "打开", "关闭"),
                _zh("重启", "unless", "", "禁止", "允许"),
                _zh("档位", "small", "档"),
            ),
        ),
    ),
}

PHRASES: dict[Language, Phrases] = {
    "en": Phrases(
        statements=(
            "Note: the {key} is {value}.",
            "Record that the {key} is {value}.",
            "From today the {key} is {value}.",
        ),
        questions=("What is the {key}?", "Tell me the {key}.", "Remind me of the {key}."),
        answer="The {key} is {value}.",
        noted="Noted.",
        key="{attribute} of {name}",
        at_most="not more than {value}",
        at_least="not less than {value}",
        date="{month} {day}",
        sum_question="Add the {first} and the {second}.",
        sum_answer="{a} plus {b} is {c}.",
        percent_question="What is {p}% of {n}?",
        percent_answer="{p}% of {n} is {c}.",
    ),
    "zh": Phrases(
        statements=("记录:{key}为{value}。", "请记下:{key}为{value}。", "今天起:{key}为{value}。"),
        questions=("请问:{key}?", "查一下:{key}?", "提醒我:{key}?"),
        answer="回复:{key}为{value}。",
        noted="已记录。",
        key="{attribute},{name}",
        at_most="不高于{value}",
        at_least="不低于{value}",
        date="{month}月{day}日",
        sum_question="求和:{first}加{second}?",
        sum_answer="{a}加{b}为{c}。",
        percent_question="{n}的{p}%?",
        percent_answer="{n}的{p}%为{c}。",
    ),
}

UNLESS: dict[Language, str] = {"en": "{choice} unless {code}", "zh": "{choice},除非{code}"}
MONTHS = ("Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec")
CODE_LETTERS = ("QX", "KT", "VN", "BR", "HZ", "MW", "DJ", "GP", "FL", "CS")
PERCENTS = (5, 10, 20, 50)
BASES = (100, 200, 300, 400, 500, 600, 700, 800, 900)
