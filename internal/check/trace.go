package check

import "strings"

// TraceID returns the trace id in a W3C traceparent header, of version 00 or a later one; empty if the header is not valid.
func TraceID(traceparent string) string {
	parts := strings.Split(traceparent, "-")
	if len(parts) < 4 || parts[0] == "00" && len(parts) > 4 || parts[0] == "ff" {
		return ""
	}
	for i, size := range []int{2, 32, 16, 2} {
		if len(parts[i]) != size || strings.Trim(parts[i], "0123456789abcdef") != "" {
			return ""
		}
	}
	if strings.Trim(parts[1], "0") == "" || strings.Trim(parts[2], "0") == "" {
		return ""
	}
	return parts[1]
}
