"""The report's style sheet. Colours are CSS variables, set once for light and once for dark mode."""

STYLE = """
:root{color-scheme:light dark;--bg:#f7f8fa;--panel:#fff;--ink:#1b1f24;--soft:#667085;--rule:#e2e5ea;
--c0:#2563eb;--c1:#e8590c;--c2:#0f9d6e;--c3:#9333ea;--c4:#d6336c;--c5:#0c8599;--c6:#a07400;--c7:#868e96;
--good:#0f7a55;--good-bg:#d9f5e9;--bad:#b42318;--bad-bg:#fde5e2;--part:#8a6100;--part-bg:#fdf0cf}
@media(prefers-color-scheme:dark){:root{--bg:#0f1216;--panel:#181c22;--ink:#e7eaee;--soft:#98a2b3;--rule:#2b313a;
--c0:#6ea8fe;--c1:#ff922b;--c2:#3ecf9a;--c3:#c084fc;--c4:#f783ac;--c5:#3bc9db;--c6:#e0b030;--c7:#868e96;
--good:#6ee7b7;--good-bg:#0d3b2c;--bad:#ffa59b;--bad-bg:#4a1712;--part:#ffd66b;--part-bg:#453408}}
*{box-sizing:border-box}
body{margin:0;background:var(--bg);color:var(--ink);font:15px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,sans-serif}
main{max-width:1060px;margin:0 auto;padding:28px 20px 60px}
h1{font-size:22px;margin:0 0 18px;overflow-wrap:anywhere}
h2{font-size:17px;margin:34px 0 10px}
small{color:var(--soft);font-weight:400;font-size:14px}
.cards{display:flex;flex-wrap:wrap;gap:12px}
.card,figure,.scroll,.config{background:var(--panel);border:1px solid var(--rule);border-radius:10px}
.card{flex:1 1 170px;padding:14px 18px}
.card.big{flex-grow:2;border-left:4px solid var(--c2)}
.label,.note{color:var(--soft);font-size:13px}
.value{font-size:21px;font-weight:650;line-height:1.35;white-space:nowrap;font-variant-numeric:tabular-nums}
.big .value{font-size:32px;line-height:1.2}
figure{margin:0;padding:12px;min-width:0}
figcaption{font-size:13px;color:var(--soft);margin:0 0 4px 4px;overflow-wrap:anywhere}
.grid-of-charts{display:grid;grid-template-columns:repeat(auto-fill,minmax(min(300px,100%),1fr));gap:12px}
.halves{display:grid;grid-template-columns:repeat(auto-fill,minmax(min(420px,100%),1fr));gap:12px}
svg{display:block;width:100%;height:auto;overflow:visible}
svg .grid{stroke:var(--rule);stroke-width:1}
svg .tick{fill:var(--soft);font-size:11px;font-variant-numeric:tabular-nums}
svg path{fill:none;stroke:currentColor;stroke-width:2;stroke-linejoin:round;stroke-linecap:round}
svg path.faint{stroke-width:1.2;opacity:.35}
svg path.dashed{stroke-width:1.5;stroke-dasharray:4 4;opacity:.8}
svg .marker{fill:currentColor;stroke:var(--panel);stroke-width:1.5}
svg .fill,svg .dot{fill:currentColor}
svg .peak{fill:var(--ink);stroke:var(--panel);stroke-width:1.5}
svg .hover{fill:transparent}
svg .hover:hover{fill:currentColor}
.legend{display:flex;flex-wrap:wrap;gap:4px 18px;padding:8px 4px 0 54px;font-size:13px;color:var(--soft)}
.legend i{display:inline-block;width:10px;height:10px;border-radius:3px;background:currentColor;margin-right:6px}
.c0{color:var(--c0)}.c1{color:var(--c1)}.c2{color:var(--c2)}.c3{color:var(--c3)}
.c4{color:var(--c4)}.c5{color:var(--c5)}.c6{color:var(--c6)}.c7{color:var(--c7)}
.scroll{overflow-x:auto}
table{width:100%;min-width:560px;border-collapse:collapse;table-layout:fixed;font-size:14px}
th{text-align:left;color:var(--soft);font-weight:500;font-size:13px}
th,td{padding:8px 12px;border-bottom:1px solid var(--rule);vertical-align:top;overflow-wrap:anywhere}
tr:last-child td{border-bottom:0}
th:nth-child(2){width:14%}
.columns-4 th:nth-child(1){width:26%}
.columns-3 th:nth-child(1){width:32%}
.compared{table-layout:auto}
.compared th,.compared td{overflow-wrap:normal;word-break:normal;width:auto}
.about{color:var(--soft);font-size:14px;margin:-12px 0 18px;overflow-wrap:anywhere}
.text{white-space:pre-wrap;overflow-wrap:anywhere;max-height:190px;overflow-y:auto;
font:13px/1.45 ui-monospace,SFMono-Regular,Menlo,Consolas,monospace}
.reply{display:flex;gap:10px;align-items:flex-start}
.reply .text{flex:1;min-width:0}
.turn{padding:4px 8px;border-left:3px solid var(--rule);margin-bottom:6px}
.turn.policy{border-left-color:var(--c0)}.turn.others{color:var(--soft)}
.reward{flex:none;min-width:34px;text-align:center;border-radius:6px;padding:0 7px;font-size:13px;font-weight:600;
font-variant-numeric:tabular-nums}
.good{color:var(--good);background:var(--good-bg)}.bad{color:var(--bad);background:var(--bad-bg)}
.part{color:var(--part);background:var(--part-bg)}.none{color:var(--soft)}
details{margin-top:12px}
summary{cursor:pointer;color:var(--soft);font-size:14px;margin-bottom:8px}
.config{margin:0;padding:14px 18px;overflow-x:auto;font:13px/1.5 ui-monospace,SFMono-Regular,Menlo,Consolas,monospace}
.unchanged{color:var(--soft);font-size:13px;margin:12px 4px;overflow-wrap:anywhere}
.empty{color:var(--soft);font-size:13px}
.finder{display:flex;flex-wrap:wrap;gap:8px;align-items:center;margin-bottom:10px}
.finder input,.finder select,#more{font:inherit;font-size:14px;color:var(--ink);background:var(--panel);
border:1px solid var(--rule);border-radius:8px;padding:6px 10px}
.finder input{flex:1;min-width:200px}
#found{color:var(--soft);font-size:13px}
#more{margin-top:10px;cursor:pointer}
.samples th:nth-child(1){width:12%}.samples th:nth-child(2){width:10%}.samples th:nth-child(3){width:30%}
.samples th:nth-child(4){width:12%}
.samples .reward{display:inline-block}
@media(max-width:600px){main{padding:18px 12px 40px}.legend{padding-left:4px}.big .value{font-size:26px}
svg.half .tick{font-size:14px}svg.wide .tick{font-size:24px}}
@media print{.text{max-height:none}}
"""
