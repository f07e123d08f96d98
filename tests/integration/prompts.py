"""Twenty prompts: short, long, many languages, code, emoji."""

_PARAGRAPH = (
    "The harbour woke before the town did. Nets lay drying on the wall, and the first boats came in low in the water, "
    "gulls behind them like a torn flag. On the quay a woman counted crates, wrote the number on her hand and counted "
    "again, because yesterday's number had been wrong and the buyer had not forgiven her for it. "
)

PROMPTS: tuple[str, ...] = (
    "Hi",
    "The capital of France is",
    "Once upon a time",
    "1, 1, 2, 3, 5, 8, 13,",
    "Q: What is 17 + 25?\nA:",
    "def fibonacci(n: int) -> int:\n    ",
    "SELECT name, COUNT(*) FROM orders WHERE",
    '{"name": "Ada", "born": 1815, "works": [',
    "#include <stdio.h>\n\nint main(void) {\n",
    "Der schnelle braune Fuchs springt über",
    "La vida es sueño, y los sueños",
    "春眠不觉晓，处处闻啼鸟。",
    "吾輩は猫である。名前は",
    "Быть или не быть, вот в чём",
    "كان يا ما كان في قديم الزمان",
    "नमस्ते दुनिया, आज का दिन",
    "🙂🚀 Emoji story: 🐱➡️🏠➡️",
    "Dear committee,\n\nI am writing to apply for",
    _PARAGRAPH * 3 + "In short:",
    _PARAGRAPH * 9 + "What happened on the quay?",
)
