"""The style sheet of the report: light and dark, wide and narrow, screen and paper."""

STYLE = """
:root{--ground:#fff;--panel:#f5f6f8;--text:#16191d;--soft:#525a66;--line:#d5d9e0;--ink:#0007;--accent:#0b5cad;
--fault:#b00020;--train:#7fc99a;--between:#c4e5cf;--wait:#9ecbea;--stall:#5fa3d8;--init:#d9c7f0;--unfinished:#e6b8d3;
--detect:#f2a35e;--decide:#f7d08a;--restart:#e88b7d;--reload:#c9b458;--redo:#d96f9c;--shutdown:#c3c8d0;--idle:#e6e8ec}
@media (prefers-color-scheme:dark){:root{--ground:#14171b;--panel:#1d2127;--text:#e8eaee;--soft:#a8b0bc;--line:#363c46;
--ink:#fff6;--accent:#7db8f0;--fault:#ff8a8a;--train:#2f7d4f;--between:#245238;--wait:#2b5f85;--stall:#20639b;
--init:#5b4a7d;--unfinished:#7d3f63;--detect:#a85f1c;--decide:#8f6a1d;--restart:#a04a3c;--reload:#716319;--redo:#93335c;
--shutdown:#4a505a;--idle:#2c3138}}
*{box-sizing:border-box}
body{margin:0;padding:1.5rem clamp(1rem,4vw,3rem);max-width:84rem;margin-inline:auto;background:var(--ground);
color:var(--text);font:15px/1.5 system-ui,sans-serif}
h1{font-size:1.7rem;margin:0}h2{font-size:1.15rem;margin:2rem 0 .6rem}header p{color:var(--soft);margin:.3rem 0 1.2rem}
.tiles{display:grid;grid-template-columns:repeat(auto-fit,minmax(14rem,1fr));gap:.8rem;margin:0}
.tile{background:var(--panel);border:1px solid var(--line);border-radius:8px;padding:.8rem 1rem}
.tile dt{color:var(--soft)}.tile dd{margin:0}.tile .value{font-size:1.6rem;font-weight:600}
.missing{color:var(--soft);font-style:italic}.note{color:var(--soft);font-size:.85em;overflow-wrap:anywhere}
table{border-collapse:collapse;width:100%;font-variant-numeric:tabular-nums}
th,td{text-align:left;padding:.3rem .6rem;border-bottom:1px solid var(--line);vertical-align:top}
thead th{color:var(--soft);font-weight:500}tbody th{font-weight:500;white-space:nowrap}tfoot{font-weight:600}
.wide{width:32%}.scroll{overflow-x:auto}.scroll td{white-space:nowrap}tr:target{background:var(--panel)}
.drawing{width:100%;height:auto;display:block}.drawing text{fill:var(--soft);font-size:12px}
.drawing .label{fill:var(--text)}.plate{fill:var(--ground);opacity:.82}.axis,.grid{stroke:var(--line);fill:none}
.curve{fill:none;stroke:var(--accent);stroke-width:1.6}.fault{fill:var(--fault)}
.ink{stroke:var(--ink);fill:none;stroke-width:1}.track{fill:var(--panel)}.swatch{vertical-align:-2px}
.defs{position:absolute}.legend{display:flex;flex-wrap:wrap;gap:.3rem 1.2rem;list-style:none;padding:0;margin:.6rem 0}
.definitions dt{font-weight:600;margin-top:.6rem}.definitions dd{margin:0}
.unseen{position:absolute;width:1px;height:1px;overflow:hidden;clip-path:inset(50%)}
a:focus-visible,.scroll:focus-visible{outline:2px solid var(--accent)}
.p-train{fill:var(--train)}.p-between{fill:var(--between)}.p-data_wait{fill:var(--wait)}
.p-checkpoint_stall{fill:var(--stall)}.p-init{fill:var(--init)}.p-unfinished{fill:var(--unfinished)}
.p-detect{fill:var(--detect)}.p-decide{fill:var(--decide)}.p-restart{fill:var(--restart)}
.p-reload{fill:var(--reload)}.p-redo{fill:var(--redo)}.p-shutdown{fill:var(--shutdown)}.p-idle{fill:var(--idle)}
@media print{body{max-width:none}section{break-inside:avoid}}
""".strip()
