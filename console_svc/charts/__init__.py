"""Pictures of the console: functions from the values of `console_svc.state` to options of ECharts
(pure).

Colours are variables of `assets/console.css`, which the SVG renderer passes on to the browser, so a
change of the theme needs no new options.
"""
