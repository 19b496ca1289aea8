package main

import (
	"encoding/json"
	"net/http"
	"os"
	"path/filepath"
)

// commit is the only version that the hub has of its model. The value is arbitrary.
const commit = "5eed5eed5eed5eed5eed5eed5eed5eed5eed5eed"

// hub serves the tokenizer as a model hub does, for any repository and revision, so that `kvepp fetch` works in a
// cluster without internet access.
func hub(folder string) {
	http.HandleFunc(
		"GET /api/models/{owner}/{repository}/revision/{revision}",
		func(w http.ResponseWriter, r *http.Request) {
			files, err := os.ReadDir(folder)
			if err != nil {
				http.Error(w, err.Error(), http.StatusInternalServerError)
				return
			}
			type sibling struct {
				Name string `json:"rfilename"`
			}
			listing := struct {
				SHA      string    `json:"sha"`
				Siblings []sibling `json:"siblings"`
			}{SHA: commit}
			for _, f := range files {
				listing.Siblings = append(listing.Siblings, sibling{f.Name()})
			}
			json.NewEncoder(w).Encode(listing)
		},
	)
	http.HandleFunc(
		"GET /{owner}/{repository}/resolve/"+commit+"/{file}",
		func(w http.ResponseWriter, r *http.Request) {
			http.ServeFile(w, r, filepath.Join(folder, filepath.Base(r.PathValue("file"))))
		},
	)
}
